"""Nothing committed is ever lost, whatever fails or hangs; failures come out on all ranks."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    Peers,
    Tier,
    TierKind,
)
from lightning_hetero.checkpoint.manifest import Buffer
from lightning_hetero.core.errors import CheckpointError, PeerError
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore
from tests.checkpoint.states import (
    PLANS,
    TWO,
    assert_is_state,
    contents,
    disk,
    needs_of,
    recover,
    remote,
    run_ranks,
    write,
)

PLAN, SIZE = PLANS["one device"]


def down(verb: str, name: str) -> None:
    raise ConnectionError("answered 500")


def recover_two(tiers: Sequence[Sequence[Tier]], step: int) -> None:
    """Compare what two nodes hold with the state at a step."""
    needs = [needs_of(rank, TWO, 2) for rank in range(2)]
    results = run_ranks(
        2, lambda rank, peers: recover(needs[rank], tiers[rank], node="ab"[rank], peers=peers)
    )
    for rank in range(2):
        assert_is_state(results[rank], needs[rank], step)


def test_what_no_own_tier_has_from_all_ranks_is_told_on_all_and_the_remote_still_gets_it() -> None:
    stores, cloud = [MemoryStore(), MemoryStore(capacity_bytes=2000)], MemoryStore()

    def save(rank: int, writer: CheckpointWriter) -> None:
        for step in (1, 2):
            saved = writer.save(contents(step, TWO, 2)[rank])
            assert saved.wait_until_uploaded(20)
            if step == 1:
                with pytest.raises(CheckpointError, match=r"Rank 1 couldn't write.*No space left"):
                    saved.wait_until_confirmed(20)

    write([[disk(store), remote(cloud)] for store in stores], save)
    assert stores[1].files == {}, "what a full disk had taken is given back"
    recover_two([[remote(cloud)]] * 2, 2)


def test_where_there_is_only_a_remote_a_leaving_node_needs_no_copies() -> None:
    store = MemoryStore()

    def save(rank: int, writer: CheckpointWriter) -> None:
        saved = writer.save(contents(1, TWO, 2)[rank], leaving=["b"])
        saved.wait_until_confirmed(20)
        assert saved.wait_until_uploaded(20)

    write([[remote(store)]] * 2, save)
    assert "step-000000000001-000000/confirmed" in store.files


def test_after_the_loss_of_a_rank_nothing_is_written_and_every_save_says_so() -> None:
    is_gone = threading.Event()
    peers = Peers(HashStore(), world_size=2, timeout_s=20.0, is_over=is_gone.is_set)
    store = MemoryStore()
    writer = CheckpointWriter([disk(store)], node_of_rank=["a", "b"], peers=peers)
    is_gone.set()
    for step in (1, 2, 3):
        saved = writer.save(contents(step, TWO, 2)[0])
        for wait in (saved.wait_until_confirmed, saved.wait_until_uploaded):
            with pytest.raises(PeerError, match="lost another rank"):
                wait(20)
        assert saved.snapshot is not None, "the memory is free again"
    assert {int(name.split("-")[1]) for name in store.files} == {1}
    with pytest.raises(CheckpointError, match=r"No lasting place.*lost another rank"):
        writer.close()


@pytest.mark.parametrize("within_s", [0.0, 3600.0])
def test_training_ends_on_all_ranks_only_when_no_lasting_place_takes_any_for_too_long(
    within_s: float,
) -> None:
    def save(rank: int, writer: CheckpointWriter) -> None:
        for step in range(1, 5):
            content = contents(step, TWO, 2)[rank]
            if within_s == 0.0 and step == 2:
                with pytest.raises(CheckpointError, match=r"Rank 1 couldn't write.*answered 500"):
                    writer.save(content)
                break
            writer.save(content).wait_until_confirmed(20)

    tiers = []
    for store in (MemoryStore(), FaultyStore(MemoryStore(), down)):
        memory = Tier(kind=TierKind.MEMORY, store=MemoryStore(), keep=1)
        tiers.append([memory, disk(store), remote(store)])
    with pytest.raises(CheckpointError, match=r"No lasting place.*answered 500"):
        write(tiers, save, lasting_within_s=within_s)


def test_a_state_that_is_not_finite_or_cannot_be_encoded_on_one_rank_replaces_none() -> None:
    stores, cloud = [MemoryStore(), MemoryStore()], MemoryStore()

    def save(rank: int, writer: CheckpointWriter) -> None:
        writer.save(contents(1, TWO, 2)[rank]).wait_until_confirmed(20)
        for step, told in ((2, "weight isn't finite"), (3, r"dtype torch\.complex64")):
            content = contents(step, TWO, 2)[rank]
            first, *others = content.slices
            if rank == 1 and step == 2:
                first.weight.view(-1)[0] = float("nan")
            elif rank == 1:
                state = {"phase": torch.zeros(2, dtype=torch.complex64)}
                content = replace(content, slices=(replace(first, state=state), *others))
            saved = writer.save(content)
            with pytest.raises(CheckpointError, match=told):
                saved.wait_until_confirmed(20)
            assert not saved.wait_until_uploaded(20)

    with pytest.raises(CheckpointError, match="isn't finite"):
        write([[disk(store, keep=1), remote(cloud, keep=1)] for store in stores], save)
    recover_two([[disk(store)] for store in stores], 1)
    assert {int(name.split("-")[1]) for name in cloud.files} == {1}


def test_a_copy_that_is_corrupt_at_its_source_is_not_spread() -> None:
    class Rotting(MemoryStore):
        """Flips a bit of every weight file that is written."""

        def write(self, name: str, chunks: Iterable[Buffer]) -> None:
            data = bytearray(b"".join(chunks))
            if name.endswith("weights.safetensors"):
                data[-1] ^= 1
            super().write(name, [bytes(data)])

    stores = [Rotting(), MemoryStore()]

    def save(rank: int, writer: CheckpointWriter) -> None:
        told = r"weights.* is corrupt: the checksum of block 0"
        with pytest.raises(CheckpointError, match=told):
            writer.save(contents(1, TWO, 2)[rank]).wait_until_confirmed(20)

    write([[disk(store)] for store in stores], save, replicas=2)
    assert not any("part-00000.json" in name for name in stores[1].files)
    assert not any(name.endswith("confirmed") for name in stores[1].files)
