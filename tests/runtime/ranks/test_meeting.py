"""Ranks meet, or say why not; those that would run different things are named at the start."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_hetero.core.errors import ConfigurationError, PeerError
from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.runtime.ranks import meeting
from lightning_hetero.runtime.ranks.communicators import Communicators, init_process_group
from lightning_hetero.runtime.ranks.meeting import _meet, connect_store
from tests.fits import attempt, each
from tests.plans import STAGES, pipeline, plan_of, stage
from tests.processes import ProcessPool, free_port
from tests.toy import TinyModule

OTHER = plan_of(pipeline(stage(0, 0, 2), stage(1, 2, 3)))


def disagree(rank: int) -> list[Any]:
    """Run with one rank of two that has another plan, options, version and data."""
    odd = rank == 1
    (same,) = each([TinyModule], STAGES, max_epochs=1)
    other = replace(same, plan=OTHER if odd else STAGES)
    texts = attempt(rank, other, replace(same, num_microbatches=3 if odd else 2))
    known = meeting.installed_version

    def version(name: str, **options: str) -> str:
        return "1.2.3" if odd and name == "torch" else known(name, **options)

    with mock.patch.object(meeting, "installed_version", version):
        return [*texts, *attempt(rank, same)]


@pytest.mark.dist
def test_a_rank_with_another_plan_options_or_versions_is_named_on_every_rank(
    pool: ProcessPool,
) -> None:
    for plan, options, version in pool.run(disagree, 2):
        for text, name in ((plan, "plan"), (options, "options"), (version, "torch")):
            assert f"Ranks don't run the same: most have {name} " in text
            assert "but rank 1 has " in text
        assert "rank 1 has 1.2.3" in version


def test_ranks_are_alike_whatever_the_order_of_their_sets() -> None:
    """Each process has its own order of a set of strings, such as the ends that share a weight."""

    def compare(**facts: frozenset[int]) -> None:
        meeting.check_alike(comms, roles=[replace(spec, **facts)])

    told: list[dict[str, str]] = []
    comms = mock.Mock(gather_objects=lambda own: told.append(own) or told)
    spec: Any = ParameterSpec(name="embed.weight", shape=(4,))
    one, other = frozenset((0, 8)), frozenset((8, 0))  # Of numbers that collide.
    assert list(one) != list(other)
    compare(roles=one)
    compare(roles=other)
    with pytest.raises(ConfigurationError, match="rank 2 has"):
        compare(roles=frozenset((0, 16)))


def test_ranks_meet_in_a_store_full_of_their_forerunners_words() -> None:
    store = dist.HashStore()
    names = set()
    for world_size in (3, 2, 4):
        with ThreadPoolExecutor(world_size) as ranks:
            found = list(
                ranks.map(lambda r, n=world_size: _meet(store, r, n, 60.0), range(world_size))
            )
        assert len(set(found)) == 1
        names.add(found[0])
    assert len(names) == 3


def test_a_rank_that_meets_nobody_says_what_may_be_wrong() -> None:
    store = dist.HashStore()
    store.set("answer/1", json.dumps(["old", "word of another start"]))
    with pytest.raises(PeerError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        _meet(store, 1, 2, 0.1)


def meet_after_one_has_tried(rank: int) -> int:
    distributed_c10d._world.group_count = rank  # Rank 1 is left from a meeting that broke off.
    store = dist.PrefixStore("next", _connect())
    timeout = timedelta(seconds=20)
    init_process_group("gloo", store, rank, 2, timeout=timeout)
    made = Communicators.create(device=torch.device("cpu"), timeout=timeout)
    return len(made.gather_objects(rank))


def _connect() -> dist.Store:
    return next(iter(dist.rendezvous("env://")))[0]


@pytest.mark.dist
def test_ranks_meet_though_some_of_them_have_counted_groups_in_vain(pool: ProcessPool) -> None:
    assert pool.run(meet_after_one_has_tried, 2) == [2, 2]


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_rank_to_which_nobody_comes_says_how_to_wait_longer(
    monkeypatch: pytest.MonkeyPatch, *, by_agent: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(by_agent))
    # On a busy machine it might come first.
    monkeypatch.setattr(meeting, "end_process", lambda *_: None)
    port, served = free_port(), list[Any]()
    if by_agent:
        served.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    told = r"Rank 0 of 2 waited 0 s .*start_timeout"
    with pytest.raises(PeerError, match=told):
        connect_store(
            "127.0.0.1",
            port,
            global_rank=0,
            world_size=2,
            start_timeout=timedelta(milliseconds=300),
        )


def test_a_port_that_is_taken_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    wait = timedelta(minutes=10)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PeerError, match=rf"store at 127.0.0.1:{port}.* MASTER_PORT"):
            connect_store("127.0.0.1", port, global_rank=0, world_size=2, start_timeout=wait)
