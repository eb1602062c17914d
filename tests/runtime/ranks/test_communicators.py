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
    GroupTransport,
    init_process_group,
)
from lightning_hetero.runtime.ranks.connections import Connections
from lightning_hetero.runtime.ranks.meeting import _meet
from tests.processes import ProcessPool

LENGTHS = (0, 1, 70_001)


def exchange(rank: int) -> tuple[list[bytes], list[bytes]]:
    dist.init_process_group("gloo")
    transport = GroupTransport(timedelta(seconds=120))
    gathered = transport.all_gather(bytes([65 + rank]) * LENGTHS[rank])
    if rank == 0:
        for length in LENGTHS:
            transport.send(b"x" * length, 2)
    received = [transport.receive(0) for _ in LENGTHS] if rank == 2 else []
    return gathered, received


@pytest.mark.dist
def test_bytes_of_any_length_arrive_in_order(pool: ProcessPool) -> None:
    results = pool.run(exchange, 3)
    for gathered, _ in results:
        assert gathered == [bytes([65 + rank]) * LENGTHS[rank] for rank in range(3)]
    assert results[2][1] == [b"x" * length for length in LENGTHS]


def wait_for_silent_peer(rank: int) -> str:
    dist.init_process_group("gloo")
    # Long enough for a busy machine: the ranks have to meet in it, too.
    transport = GroupTransport(timedelta(seconds=5))
    message = ""
    if rank == 0:
        with pytest.raises(PeerError) as caught:
            transport.receive(1)
        message = str(caught.value)
    dist.barrier()
    return message


@pytest.mark.dist
def test_a_silent_rank_is_named(pool: ProcessPool) -> None:
    assert "Rank 0 lost rank 1" in pool.run(wait_for_silent_peer, 2)[0]


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
