"""Training waits for the snapshot alone; slow places delay nothing; wrong options are refused."""

import threading
from dataclasses import replace

import pytest
import torch

from lightning_hetero.checkpoint import (
    CheckpointWriter,
    SavedCheckpoint,
    Tier,
    TierKind,
    WriterOptions,
)
from lightning_hetero.core.errors import ConfigurationError
from tests.checkpoint.stand_ins import FaultyStore, MemoryStore
from tests.checkpoint.states import (
    PLANS,
    TWO,
    Gate,
    assert_is_state,
    contents,
    disk,
    needs_of,
    recover,
    remote,
    write,
)

PLAN, SIZE = PLANS["one device"]


NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_save_returns_before_anything_is_written_and_keeps_what_was_saved(device: str) -> None:
    gate, store = Gate(), MemoryStore()
    writer = CheckpointWriter([disk(FaultyStore(store, gate))])
    content = contents(1, PLAN, SIZE)[0]
    moved = [
        replace(
            item,
            weight=item.weight.to(device),
            state={key: value.to(device) for key, value in item.state.items()},
        )
        for item in content.slices
    ]
    content = replace(content, slices=tuple(moved))
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
    place = first.snapshot.content.slices[0].weight.data_ptr()
    result: list[SavedCheckpoint] = []
    second = threading.Thread(target=lambda: result.append(writer.save(contents(2, PLAN, SIZE)[0])))
    second.start()
    second.join(0.2)
    assert second.is_alive(), "the second save must wait for the first one's memory"
    gate.open.set()
    second.join(20)
    result[0].wait_until_confirmed(20)
    assert result[0].snapshot.content.slices[0].weight.data_ptr() == place
    writer.close()


def test_each_tier_keeps_its_newest_checkpoints() -> None:
    memory, local, cloud = MemoryStore(), MemoryStore(), MemoryStore()
    writer = CheckpointWriter(
        [
            Tier(kind=TierKind.MEMORY, store=memory, keep=1),
            disk(local, keep=2),
            remote(cloud, keep=3),
        ]
    )
    for step in range(1, 6):
        writer.save(contents(step, PLAN, SIZE)[0]).wait_until_uploaded(20)
    writer.close()

    def steps(store: MemoryStore) -> list[int]:
        return sorted({int(name.split("-")[1]) for name in store.files})

    assert (steps(memory), steps(local), steps(cloud)) == ([5], [4, 5], [3, 4, 5])


@pytest.mark.parametrize("ends", ["training", "by notice"])
def test_a_slow_remote_delays_no_checkpoint_and_gets_the_newest_in_the_end(ends: str) -> None:
    gates, cloud = [Gate(), Gate()], MemoryStore()
    gates[1].open.set()
    saved: list[list[SavedCheckpoint]] = [[], []]

    def save(rank: int, writer: CheckpointWriter) -> None:
        for step in (1, 2, 3):
            saved[rank].append(writer.save(contents(step, TWO, 2)[rank]))
            saved[rank][-1].wait_until_confirmed(20)
        assert gates[rank].reached.wait(20)
        if ends == "by notice":
            writer.upload_newest()
        gates[0].open.set()
        if ends == "by notice":
            assert saved[rank][-1].wait_until_uploaded(20)

    write([[disk(MemoryStore()), remote(FaultyStore(cloud, gate))] for gate in gates], save)
    # All ranks skip the same ones, though the remote is slow for one of them only.
    for own in saved:
        assert [item.wait_until_uploaded(20) for item in own] == [True, False, True]
    assert {int(name.split("-")[1]) for name in cloud.files} == {1, 3}


def test_an_upload_that_waits_is_skipped_when_the_writer_is_left() -> None:
    slow = Gate()
    writer = CheckpointWriter([disk(MemoryStore()), remote(FaultyStore(MemoryStore(), slow))])
    saved = [writer.save(contents(step, PLAN, SIZE)[0]) for step in (1, 2)]
    assert slow.reached.wait(20)
    writer.leave()
    assert not saved[1].wait_until_uploaded(20)
    slow.open.set()
    assert saved[0].wait_until_uploaded(20)


@pytest.mark.parametrize(
    ("kinds", "replicas", "told"),
    [
        ([], 1, "one tier or more"),
        ([TierKind.REMOTE, TierKind.REMOTE], 1, "one tier or more"),
        ([TierKind.REMOTE], 2, "local tier"),
    ],
)
def test_tiers_that_do_not_go_together_are_refused(
    kinds: list[TierKind], replicas: int, told: str
) -> None:
    with pytest.raises(ConfigurationError, match=told):
        CheckpointWriter(
            [Tier(kind=kind, store=MemoryStore()) for kind in kinds],
            options=WriterOptions(replicas=replicas),
        )
