"""Training waits for the snapshot alone; nothing committed is ever lost; failures come out."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    FaultyStore,
    MemoryStore,
    RetryingStore,
    RetryPolicy,
    SavedCheckpoint,
    Store,
    Throttle,
    ThrottledStore,
    Tier,
    TierKind,
    Transport,
    WriterOptions,
    recover,
)
from lightning_hetero.checkpoint import snapshot as snapshots
from lightning_hetero.checkpoint.blocks import Buffer
from lightning_hetero.checkpoint.snapshot import HostBuffer
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from tests.checkpoint.states import assert_is_state, contents, needs_of, run_ranks
from tests.checkpoint.test_recovery import PLANS

PLAN, SIZE = PLANS["one device"]
TWO = ParallelPlan.even(world_size=2, num_layers=4)


def disk(store: Store, **options: int) -> Tier:
    return Tier(kind=TierKind.DISK, store=store, **options)


class Gate:
    """A `before` that holds writes up until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, verb: str, name: str) -> None:
        if verb == "write":
            self.reached.set()
            assert self.open.wait(20)


def test_save_returns_before_anything_is_written_and_keeps_what_was_saved() -> None:
    gate, store = Gate(), MemoryStore()
    writer = CheckpointWriter([disk(FaultyStore(store, gate))])
    content = contents(1, PLAN, SIZE)[0]
    saved = writer.save(content)
    saved.wait_for_snapshot()
    assert not store.files
    for item in content.slices:
        # The optimizer step may go on in place.
        item.weight.fill_(float("nan"))
        item.state["exp_avg"].zero_()
    gate.open.set()
    writer.close()
    needs = needs_of(0, PLAN, SIZE)
    assert_is_state(recover(needs, [disk(store)]), needs, 1)


def test_one_snapshot_is_in_memory_at_a_time_and_its_memory_is_reused() -> None:
    gate, store = Gate(), MemoryStore()
    writer = CheckpointWriter([disk(FaultyStore(store, gate))])
    first = writer.save(contents(1, PLAN, SIZE)[0])
    place = first.snapshot.tensors[0, "weight"].data_ptr()
    result: list[SavedCheckpoint] = []
    second = threading.Thread(target=lambda: result.append(writer.save(contents(2, PLAN, SIZE)[0])))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second save must wait for the first one's memory"
    gate.open.set()
    second.join(20)
    result[0].wait_until_confirmed(20)
    assert result[0].snapshot.tensors[0, "weight"].data_ptr() == place
    writer.close()


def test_waiting_for_memory_in_vain_is_a_timeout() -> None:
    memory = HostBuffer()
    memory.take(contents(1, PLAN, SIZE)[0])
    with pytest.raises(TimeoutError, match="wasn't written"):
        memory.take(contents(2, PLAN, SIZE)[0], timeout_s=0.01)
    memory.close()


def test_each_tier_keeps_its_newest_checkpoints() -> None:
    memory, local, remote = MemoryStore(), MemoryStore(), MemoryStore()
    writer = CheckpointWriter(
        [
            Tier(kind=TierKind.MEMORY, store=memory, keep=1),
            disk(local, keep=2),
            Tier(kind=TierKind.REMOTE, store=remote, keep=3),
        ]
    )
    for step in range(1, 6):
        writer.save(contents(step, PLAN, SIZE)[0]).wait_until_uploaded(20)
    writer.close()

    def steps(store: MemoryStore) -> list[int]:
        return sorted({int(name.split("-")[1]) for name in store.files})

    assert (steps(memory), steps(local), steps(remote)) == ([5], [4, 5], [3, 4, 5])


FULL = OSError(28, "No space left on device")


def down(verb: str, name: str) -> None:
    raise ConnectionError("answered 500")


def recover_two(stores: Sequence[Store], step: int) -> None:
    """Compare what two nodes' disks hold with the state at a step."""
    needs = [needs_of(rank, TWO, 2) for rank in range(2)]
    results = run_ranks(
        2,
        lambda rank, transport: recover(
            needs[rank], [disk(stores[rank])], node="ab"[rank], transport=transport
        ),
    )
    for rank in range(2):
        assert_is_state(results[rank], needs[rank], step)


def test_a_tier_that_failed_on_one_rank_is_neither_confirmed_nor_pruned_on_any() -> None:
    stores = [MemoryStore(), MemoryStore()]
    is_full = threading.Event()

    def before(verb: str, name: str) -> None:
        # The marker of 21 bytes still fits.
        if verb == "write" and is_full.is_set() and not name.endswith("confirmed"):
            raise FULL

    def save(rank: int, transport: Transport) -> None:
        tiers = [
            Tier(kind=TierKind.MEMORY, store=MemoryStore(), keep=1),
            disk((stores[0], FaultyStore(stores[1], before))[rank], keep=1),
        ]
        writer = CheckpointWriter(tiers, node_of_rank=["a", "b"], transport=transport)
        for step in range(1, 6):
            if step == 3 and rank == 0:
                is_full.set()
            # Complete in memory all the time.
            writer.save(contents(step, TWO, 2)[rank]).wait_until_confirmed(20)
        with pytest.raises(CheckpointError, match=r"has step 5.*since step 2.*No space left"):
            writer.close()

    run_ranks(2, save)
    recover_two(stores, 2)
    steps = [sorted({int(name.split("-")[1]) for name in store.files}) for store in stores]
    # What is torn doesn't pile up: the newest try may be there, where it was written.
    assert steps == [[2, 5], [2]]


def test_what_no_own_tier_has_from_all_ranks_is_told_on_all_and_the_remote_still_gets_it() -> None:
    stores = [MemoryStore(), MemoryStore(capacity_bytes=2000)]
    remote = MemoryStore()

    def save(rank: int, transport: Transport) -> None:
        tiers = [disk(stores[rank]), Tier(kind=TierKind.REMOTE, store=remote)]
        writer = CheckpointWriter(tiers, node_of_rank=["a", "b"], transport=transport)
        for step in (1, 2):
            saved = writer.save(contents(step, TWO, 2)[rank])
            assert saved.wait_until_uploaded(20)
            if step == 1:
                with pytest.raises(CheckpointError, match=r"Rank 1 couldn't write.*No space left"):
                    saved.wait_until_confirmed(20)
        writer.close()

    run_ranks(2, save)
    assert stores[1].files == {}, "what a full disk had taken is given back"
    needs = [needs_of(rank, TWO, 2) for rank in range(2)]
    tiers = [Tier(kind=TierKind.REMOTE, store=remote)]
    results = run_ranks(2, lambda rank, transport: recover(needs[rank], tiers, transport=transport))
    for rank in range(2):
        assert_is_state(results[rank], needs[rank], 2)


@pytest.mark.parametrize("within_s", [0.0, 3600.0])
def test_training_ends_on_all_ranks_only_when_no_lasting_place_takes_any_for_too_long(
    within_s: float,
) -> None:
    def save(rank: int, transport: Transport) -> None:
        memory = Tier(kind=TierKind.MEMORY, store=MemoryStore(), keep=1)
        broken = FaultyStore(MemoryStore(), down) if rank == 1 else MemoryStore()
        remote = Tier(kind=TierKind.REMOTE, store=broken)
        options = WriterOptions(lasting_within_s=within_s)
        writer = CheckpointWriter(
            [memory, disk(broken), remote],
            node_of_rank=["a", "b"],
            transport=transport,
            options=options,
        )
        for step in range(1, 5):
            content = contents(step, TWO, 2)[rank]
            if within_s == 0.0 and step == 2:
                with pytest.raises(CheckpointError, match=r"Rank 1 couldn't write.*answered 500"):
                    writer.save(content)
                break
            writer.save(content).wait_until_confirmed(20)
        with pytest.raises(CheckpointError, match=r"No lasting place.*answered 500"):
            writer.close()

    run_ranks(2, save)


def test_a_failing_remote_never_ends_training_while_a_disk_takes_all() -> None:
    local = MemoryStore()
    flaky = RetryingStore(
        FaultyStore(MemoryStore(), down), RetryPolicy(attempts=3, first_pause_s=0.0)
    )
    writer = CheckpointWriter(
        [disk(local), Tier(kind=TierKind.REMOTE, store=flaky)],
        options=WriterOptions(lasting_within_s=0.0),
    )
    for step in (1, 2, 3):
        saved = writer.save(contents(step, PLAN, SIZE)[0])
        saved.wait_until_confirmed(20)
        with pytest.raises(CheckpointError, match=r"3 attempts.*500"):
            saved.wait_until_uploaded(20)
    writer.close()
    needs = needs_of(0, PLAN, SIZE)
    assert_is_state(recover(needs, [disk(local)]), needs, 3)


def test_what_does_not_read_back_after_the_last_save_is_not_safe() -> None:
    store = MemoryStore()
    writer = CheckpointWriter([disk(store)])
    writer.save(contents(1, PLAN, SIZE)[0]).wait_until_confirmed(20)
    name = next(name for name in store.files if "layer-0002" in name)
    del store.files[name]
    with pytest.raises(CheckpointError, match="No lasting place"):
        writer.close()


def test_a_state_that_is_not_finite_replaces_none() -> None:
    stores = [MemoryStore(), MemoryStore()]
    remote = MemoryStore()

    def save(rank: int, transport: Transport) -> None:
        tiers = [disk(stores[rank], keep=1), Tier(kind=TierKind.REMOTE, store=remote, keep=1)]
        writer = CheckpointWriter(tiers, node_of_rank=["a", "b"], transport=transport)
        writer.save(contents(1, TWO, 2)[rank]).wait_until_confirmed(20)
        for step in (2, 3):
            content = contents(step, TWO, 2)[rank]
            if rank == 1:
                content.slices[0].weight.view(-1)[0] = float("nan" if step == 2 else "inf")
            saved = writer.save(content)
            with pytest.raises(CheckpointError, match=r"weight isn't finite at step"):
                saved.wait_until_confirmed(20)
            assert not saved.wait_until_uploaded(20)
        with pytest.raises(CheckpointError, match="isn't finite"):
            writer.close()

    run_ranks(2, save)
    recover_two(stores, 1)
    assert {int(name.split("-")[1]) for name in remote.files} == {1}


def test_what_one_rank_cannot_encode_is_told_on_all_and_the_next_checkpoint_is_saved() -> None:
    stores = [MemoryStore(), MemoryStore()]

    def save(rank: int, transport: Transport) -> None:
        writer = CheckpointWriter(
            [disk(stores[rank])],
            node_of_rank=["a", "b"],
            transport=transport,
        )
        odd = contents(1, TWO, 2)[rank]
        if rank == 1:
            state = {"phase": torch.zeros(2, dtype=torch.complex64)}
            odd = replace(odd, slices=(replace(odd.slices[0], state=state), *odd.slices[1:]))
        with pytest.raises(CheckpointError, match=r"phase has dtype torch\.complex64"):
            writer.save(odd).wait_until_confirmed(20)
        writer.save(contents(2, TWO, 2)[rank]).wait_until_confirmed(20)
        writer.close()

    run_ranks(2, save)


def test_storage_that_hangs_on_one_rank_costs_checkpoints_and_no_wait_for_ever() -> None:
    gate, stores = Gate(), [MemoryStore(), MemoryStore()]

    def save(rank: int, transport: Transport) -> None:
        store = FaultyStore(stores[1], gate) if rank == 1 else stores[0]
        writer = CheckpointWriter(
            [disk(store)],
            node_of_rank=["a", "b"],
            transport=transport,
            options=WriterOptions(stall_s=1.0),
        )
        for step in (1, 2):
            saved = writer.save(contents(step, TWO, 2)[rank])
            assert (saved.snapshot is None) == (rank == 1 and step == 2)
            with pytest.raises(CheckpointError, match=r"Rank 1: storage"):
                saved.wait_until_confirmed(20)
        # Both ranks have got here, so the transport is as good as before.
        transport.all_gather(b"")
        gate.open.set()
        step = 2
        while True:
            step += 1
            with contextlib.suppress(CheckpointError):
                writer.save(contents(step, TWO, 2)[rank]).wait_until_confirmed(20)
                break
        writer.close()

    run_ranks(2, save)
    assert all(any(name.endswith("confirmed") for name in store.files) for store in stores)


def test_no_rank_is_given_up_while_its_storage_moves() -> None:
    """A rank whose storage is far slower than the transport's own patience is waited for."""
    stores: list[Store] = [MemoryStore(), MemoryStore()]
    stores[1] = ThrottledStore(stores[1], Throttle(20_000.0))

    def save(rank: int, transport: Transport) -> None:
        writer = CheckpointWriter(
            [disk(stores[rank])],
            node_of_rank=["a", "b"],
            transport=transport,
            options=WriterOptions(stall_s=1.0),
        )
        writer.save(contents(1, TWO, 2)[rank]).wait_until_confirmed(60)
        writer.close()

    # No exchange may take longer than this, though the write takes about a second.
    run_ranks(2, save, timeout_s=0.7)
    recover_two(stores, 1)


@pytest.mark.parametrize("ends", ["training", "by notice"])
def test_a_slow_remote_delays_no_checkpoint_and_gets_the_newest_in_the_end(ends: str) -> None:
    plan = ParallelPlan.even(world_size=2, num_layers=4)
    gates = [Gate(), Gate()]
    remote = MemoryStore()
    locals_ = [MemoryStore(), MemoryStore()]
    gates[1].open.set()

    def save(rank: int, transport: Transport) -> list[bool]:
        tiers = [
            disk(locals_[rank]),
            Tier(kind=TierKind.REMOTE, store=FaultyStore(remote, gates[rank])),
        ]
        writer = CheckpointWriter(tiers, node_of_rank=["a", "b"], transport=transport)
        saved = []
        for step in (1, 2, 3):
            saved.append(writer.save(contents(step, plan, 2)[rank]))
            saved[-1].wait_until_confirmed(20)
        assert gates[rank].reached.wait(20)
        if ends == "by notice":
            writer.upload_newest()
        gates[0].open.set()
        if ends == "training":
            writer.close()
        # All ranks skip the same ones, though the remote is slow for one of them only.
        return [item.wait_until_uploaded(20) for item in saved]

    assert run_ranks(2, save) == [[True, False, True]] * 2
    assert {int(name.split("-")[1]) for name in remote.files} == {1, 3}


def test_a_leaving_nodes_part_goes_to_a_node_that_stays() -> None:
    plan = ParallelPlan.even(world_size=3, num_layers=4)
    stores = [MemoryStore() for _ in range(3)]

    def save(rank: int, transport: Transport) -> None:
        writer = CheckpointWriter(
            [disk(stores[rank])], node_of_rank=["a", "b", "c"], transport=transport
        )
        writer.save(contents(4, plan, 3)[rank], leaving=["b"]).wait_until_confirmed(20)
        writer.close()

    run_ranks(3, save)
    stores[1].files.clear()
    new_plan = ParallelPlan.even(world_size=2, num_layers=4)
    needs = [needs_of(rank, new_plan, 2) for rank in range(2)]
    results = run_ranks(
        2,
        lambda rank, transport: recover(
            needs[rank], [disk(stores[2 * rank])], node="ac"[rank], transport=transport
        ),
    )
    for rank in range(2):
        assert_is_state(results[rank], needs[rank], 4)


def test_a_copy_that_is_corrupt_at_its_source_is_not_spread() -> None:
    plan = ParallelPlan.even(world_size=2, num_layers=4)

    class Rotting(MemoryStore):
        """Flips a bit of every weight file that is written."""

        def write(self, name: str, chunks: Iterable[Buffer]) -> None:
            data = bytearray(b"".join(chunks))
            if name.endswith("weights.safetensors"):
                data[-1] ^= 1
            super().write(name, [bytes(data)])

    stores = [Rotting(), MemoryStore()]

    def save(rank: int, transport: Transport) -> None:
        writer = CheckpointWriter(
            [disk(stores[rank])],
            node_of_rank=["a", "b"],
            transport=transport,
            options=WriterOptions(replicas=2),
        )
        with pytest.raises(CheckpointError, match="corrupt at its source"):
            writer.save(contents(1, plan, 2)[rank]).wait_until_confirmed(20)
        writer.close()

    run_ranks(2, save)
    assert not any("part-00000.json" in name for name in stores[1].files)
    assert not any(name.endswith("confirmed") for name in stores[1].files)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60), st.sampled_from(["write", "commit", "remove", "list"]))
def test_whichever_file_operation_fails_the_newest_committed_checkpoint_stays(
    at: int, verb: str
) -> None:
    store = MemoryStore()
    writer = CheckpointWriter([disk(store, keep=1)])
    writer.save(contents(1, PLAN, SIZE)[0]).wait_until_confirmed(20)
    writer.close()
    left = [at]

    def crash(called: str, name: str) -> None:
        # From the failing operation on nothing works any more: the process is dead.
        if called == verb or left[0] < 0:
            left[0] -= 1
            if left[0] < 0:
                raise OSError(5, "killed")

    writer = CheckpointWriter([disk(FaultyStore(store, crash), keep=1)])
    committed = 1
    for step in (2, 3):
        try:
            writer.save(contents(step, PLAN, SIZE)[0]).wait_until_confirmed(20)
            committed = step
        except CheckpointError:
            break
    needs = needs_of(0, PLAN, SIZE)
    found = recover(needs, [disk(store)])
    assert found is not None
    assert found.id.step >= committed
    assert_is_state(found, needs, found.id.step)


@pytest.mark.parametrize("kinds", [[], [TierKind.REMOTE, TierKind.REMOTE]])
def test_no_tier_and_two_remote_tiers_are_refused(kinds: list[TierKind]) -> None:
    with pytest.raises(ConfigurationError, match="one tier or more"):
        CheckpointWriter([Tier(kind=kind, store=MemoryStore()) for kind in kinds])


def test_replicas_need_a_local_tier() -> None:
    with pytest.raises(ConfigurationError, match="local tier"):
        CheckpointWriter(
            [Tier(kind=TierKind.REMOTE, store=MemoryStore())], options=WriterOptions(replicas=2)
        )


def test_metadata_that_cannot_be_read_back_is_refused_at_once() -> None:
    writer = CheckpointWriter([disk(MemoryStore())])
    content = replace(contents(1, PLAN, SIZE)[0], metadata={"hook": Callable})
    with pytest.raises(CheckpointError, match="'hook'"):
        writer.save(content)
    # The host memory is still free.
    writer.save(contents(2, PLAN, SIZE)[0]).wait_until_confirmed(20)
    writer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_snapshot_of_device_tensors_is_what_they_were() -> None:
    content = contents(1, PLAN, SIZE)[0]
    moved = replace(
        content,
        slices=tuple(
            replace(
                item,
                weight=item.weight.cuda(),
                state={key: value.cuda() for key, value in item.state.items()},
            )
            for item in content.slices
        ),
    )
    store = MemoryStore()
    writer = CheckpointWriter([disk(store)])
    saved = writer.save(moved)
    saved.wait_for_snapshot()
    for item in moved.slices:
        item.weight.zero_()
    writer.close()
    needs = needs_of(0, PLAN, SIZE)
    assert_is_state(recover(needs, [disk(store)]), needs, 1)


def test_a_device_that_does_not_answer_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshots, "_LONGEST_COPY_S", 0.01)
    hangs: Future[None] = Future()
    content: Any = None
    taken = snapshots.Snapshot(
        content=content, tensors={}, _future=hangs, _free=threading.Semaphore(0)
    )
    with pytest.raises(TimeoutError, match="wasn't copied to the host"):
        taken.wait()
