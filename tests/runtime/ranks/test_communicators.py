"""Bytes of any length between ranks; ranks that meet in a store, or a process, that was used."""

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.ranks.communicators import (
    Communicators,
    init_process_group,
)
from lightning_hetero.runtime.ranks.connections import Connections
from lightning_hetero.runtime.ranks.meeting import _meet
from tests.processes import ProcessPool


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


def test_a_thread_that_was_left_behind_makes_no_further_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[object] = []

    def new_group(**_: object) -> object:
        made.append(object())
        connections.hang_up()  # The run goes on without what waits here.
        return mock.Mock(spec=dist.ProcessGroup)

    connections = Connections()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(RuntimeError, match="hung up"):
        Communicators.create(
            device=torch.device("cpu"), timeout=timedelta(seconds=1), connections=connections
        )
    assert len(made) == 1
