"""A plan may change between iterations: losses go on as if it hadn't."""

from typing import Any

import lightning as L
import pytest
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import PlanError
from tests.processes import ProcessPool
from tests.toy import ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


def plan_of(*pipelines: list[tuple[int, int, int]]) -> ParallelPlan:
    """Build a plan from (rank, first layer, last layer + 1) of each stage of each pipeline."""
    return ParallelPlan.from_dict(
        {
            "pipelines": [
                {"stages": [{"ranks": [rank], "layers": [a, b]} for rank, a, b in stages]}
                for stages in pipelines
            ]
        }
    )


PLANS = [
    plan_of([(0, 0, 3)], [(1, 0, 1), (2, 1, 3)]),
    plan_of([(0, 0, 3)], [(1, 0, 2), (2, 2, 3)]),
    plan_of([(0, 0, 3)], [(2, 0, 2), (1, 2, 3)]),
]


class ChangesPlan(L.Callback):
    """Runs another plan in every iteration."""

    def __init__(self, plans: list[ParallelPlan]) -> None:
        self.plans = plans

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, HeteroStrategy)
        trainer.strategy.change_plan(self.plans[trainer.global_step % len(self.plans)])


def train(
    rank: int, plans: list[ParallelPlan], *options: bool
) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(0)
    module = ToyModule(ToyOptions(tied=any(options)))
    strategy = HeteroStrategy(plan=plans[0], num_microbatches=2)
    trainer = L.Trainer(
        strategy=strategy,
        callbacks=[ChangesPlan(plans)] if len(plans) > 1 else [],
        **quiet(devices=3, max_steps=6),
    )
    trainer.fit(module, loader(64, 4), loader(8, 4, seed=1))
    return module.losses, {key: value.numpy() for key, value in module.state_dict().items()}


def test_losses_and_weights_do_not_depend_on_changes_of_plan(pool: ProcessPool) -> None:
    for tied in (False, True):
        still, changing = (pool.run(train, 3, plans, tied)[0] for plans in (PLANS[:1], PLANS))
        assert changing[0] == pytest.approx(still[0], rel=1e-5)
        for name, weight in still[1].items():
            assert changing[1][name] == pytest.approx(weight, rel=1e-4, abs=1e-5), name


def test_runs_that_change_plans_alike_are_equal_bit_for_bit(pool: ProcessPool) -> None:
    first, second = (pool.run(train, 3, PLANS, False) for _ in range(2))
    for (losses, weights), (other_losses, other_weights) in zip(first, second, strict=True):
        assert losses == other_losses
        for name, weight in weights.items():
            assert (weight == other_weights[name]).all()


def refuse(rank: int) -> str:
    torch.manual_seed(0)
    swapped = plan_of([(1, 0, 3)], [(0, 0, 1), (2, 1, 3)])
    trainer = L.Trainer(
        strategy=HeteroStrategy(plan=PLANS[0]),
        callbacks=[ChangesPlan([swapped])],
        **quiet(devices=3, max_steps=2),
    )
    with pytest.raises(PlanError) as caught:
        trainer.fit(ToyModule(ToyOptions()), loader(64, 4))
    return str(caught.value)


def test_a_plan_that_would_need_other_batches_is_refused(pool: ProcessPool) -> None:
    for message in pool.run(refuse, 3):
        assert "data loader has dealt the next batches" in message
