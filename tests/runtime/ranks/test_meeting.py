"""Ranks that would run different things are named at the start, and batches are compared."""

from dataclasses import replace
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import BatchError, ConfigurationError, HeteroError
from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.models.batches import fingerprint_of
from lightning_hetero.runtime.ranks import meeting
from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.step_cases import STAGES, TinyModule
from tests.toy import loader, quiet

OTHER = plan_of(pipeline(stage(0, 0, 2), stage(1, 2, 3)))


def fit_with(rank: int, plan: dict[str, Any], options: dict[str, Any], batch_size: int) -> str:
    L.seed_everything(1, verbose=False)
    strategy = HeteroStrategy(ParallelPlan.from_dict(plan), **options)
    trainer = L.Trainer(**quiet(strategy=strategy, devices=2, max_epochs=1, max_steps=1))
    try:
        trainer.fit(TinyModule(), loader(4, batch_size, seed=batch_size))
    except HeteroError as error:
        return str(error)
    return ""


def disagree(rank: int) -> list[str]:
    """Run with one rank of two that has another plan, options, version and data."""
    odd = rank == 1
    texts = [
        fit_with(rank, OTHER if odd else STAGES, {}, 2),
        fit_with(rank, STAGES, {"num_microbatches": 3 if odd else 2}, 2),
    ]
    known = meeting.installed_version

    def version(name: str, **options: str) -> str:
        return "1.2.3" if odd and name == "torch" else known(name, **options)

    with mock.patch.object(meeting, "installed_version", version):
        texts.append(fit_with(rank, STAGES, {}, 2))
    return texts


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


@pytest.mark.dist
def test_batches_are_compared_by_what_they_hold_before_they_are_moved(pool: ProcessPool) -> None:
    for text in pool.run(fit_on_other_device, 2):
        assert "Ranks 0 and 1 of pipeline 0 got different batches" in text


def fit_on_other_device(rank: int) -> str:
    """Train with other values on each rank, on a device whose tensors can't be read."""

    class Unreadable(TinyModule):
        def transfer_batch_to_device(self, batch: Any, *_: Any) -> Any:
            moved.append(torch.is_tensor(batch[0]))
            return [batch[0] * 0, batch[1] * 0]

    moved: list[bool] = []
    L.seed_everything(1, verbose=False)
    strategy = HeteroStrategy(ParallelPlan.from_dict(STAGES))
    trainer = L.Trainer(**quiet(strategy=strategy, devices=2, max_epochs=1))
    try:
        trainer.fit(Unreadable(), loader(4, 2, seed=rank))
    except BatchError as error:
        return str(error)
    return ""


def test_a_fingerprint_follows_number_shapes_and_values() -> None:
    ids = torch.arange(6).reshape(2, 3)
    known = fingerprint_of([ids, ids])
    assert known == fingerprint_of([ids.clone(), ids.clone()])
    others = ([ids], [ids, ids + 1], [ids, ids.reshape(3, 2)])
    assert len({fingerprint_of(parts) for parts in others} | {known}) == 4
