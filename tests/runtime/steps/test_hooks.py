"""What hooks do to weights and gradients, which are slices there, is right or refused."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import ConfigurationError, StepError
from tests.fits import Make, check, each, refused, train
from tests.plans import COPIES, SHARDED, STAGES, UNEQUAL, pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.steps import hook_modules as hooks
from tests.runtime.steps.refused_hooks import DOES, Does
from tests.toy import TinyModule

pytestmark = pytest.mark.dist

RIGHT: list[Make] = [
    hooks.ClipsByHand,
    hooks.ClipsByStrategy,
    hooks.ClipsEach,
    hooks.ClipsGreatest,
    hooks.LogsNorms,
    hooks.LogsChangedNorms,
    hooks.LogsEachNorm,
    hooks.TrainsNewRows,
    hooks.LeavesOut,
    hooks.AveragesWhatTravels,
    hooks.ByElements,
    hooks.SwapsAverages,
    hooks.AlongRows,
    hooks.ReplacesData,
    hooks.BySize,
    hooks.LoadsParts,
]


@pytest.mark.parametrize("plan", [COPIES, STAGES], ids=["copies", "stages"])
def test_hooks_get_one_devices_numbers(pool: ProcessPool, plan: Any) -> None:
    check(pool, *each(RIGHT, plan))


def test_hooks_get_one_devices_numbers_in_other_runs(pool: ProcessPool) -> None:
    norms: list[Make] = [hooks.ClipsByHand, hooks.LogsNorms, hooks.LogsEachNorm]
    standbys = {"redundancy": 1, "num_microbatches": 1}
    four = plan_of(*(pipeline(stage(rank, 0, 3)) for rank in range(4)))
    check(pool, *each([*norms, hooks.TrainsNewRows], four, options=standbys))
    check(pool, *each([hooks.LogsNorms], STAGES, accumulate_grad_batches=2))
    check(pool, *each([hooks.ReplacesData], UNEQUAL, options={"ownership": "even"}))
    # Parameters of one shape have the same rows on a rank if all are cut evenly.
    check(pool, *each([hooks.FollowsTeacher], UNEQUAL, options={"ownership": "even"}))
    refused(pool, {hooks.FollowsTeacher: 'ownership="even"'}, UNEQUAL)
    # Rows may be chosen by their numbers where one rank has all of them.
    check(pool, *each([hooks.ZeroesOldRows], STAGES))
    cut = {"tp_plan": {"layers.*.0": "colwise", "layers.*.2": "rowwise"}}
    check(pool, *each([hooks.NormsOfColumns, hooks.NormsOfRows], SHARDED, options=cut))


REFUSED: dict[Make, str] = {
    hooks.Gathers: "A step calls self.all_gather",
    hooks.ZeroesOldRows: "own_rows(parameter)",
    hooks.StepsByRatio: 'ownership="parameter"',
    hooks.Averages: "under torch.no_grad()",
    hooks.AveragesData: "under torch.no_grad()",
    hooks.ByNorm: "parameter model.embed.weight are used in configure_optimizers",
    hooks.ChangesInStep: "changes parameter",
    hooks.ChangesDataInStep: "changes parameter",
    hooks.Renorms: "changes parameter",
    **{partial(Does, kind): f"{told} is called" for kind, (_, told, _) in DOES.items()},
}


def test_hooks_and_steps_that_would_differ_between_ranks_are_refused(pool: ProcessPool) -> None:
    refused(pool, REFUSED, COPIES)
    anywhere = (hooks.ChangesInStep, hooks.ChangesDataInStep, hooks.Renorms, hooks.ByNorm)
    refused(pool, {make: REFUSED[make] for make in anywhere}, STAGES)


USES: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda weight: weight.grad @ weight.grad.T,
    "setitem": lambda weight: weight.grad.__setitem__(3, 0.0),
    "getitem": lambda weight: weight.grad[:2],
    "numpy": lambda weight: weight.grad.detach().cpu().numpy(),
    "prod": lambda weight: weight.grad.prod(),
    "median": lambda weight: weight.grad.median(),
    "split": lambda weight: weight.grad.split(2),
    "tolist": lambda weight: weight.grad.tolist(),
    "matrix_norm": lambda weight: torch.linalg.matrix_norm(weight.grad),
    "deepcopy": copy.deepcopy,
    "pickling or saving": lambda weight: torch.save(weight, io.BytesIO()),
}


EARLY_USES: list[Callable[[Any], Any]] = [
    lambda layer: layer.weight + 1,
    lambda layer: layer.weight.data,
    lambda layer: layer.weight.detach(),
    lambda layer: layer.weight[0],
    lambda layer: layer.weight.cpu(),
    lambda layer: list(layer.weight),
    lambda layer: torch.stack([layer.weight]),
    lambda layer: layer(torch.ones(6)),
    lambda layer: layer.state_dict(),
    lambda layer: nn.init.zeros_(layer.weight),
    copy.deepcopy,
]
"""Of values in `configure_optimizers`, where only shapes are known."""


class UsesWhole(TinyModule):
    """Uses a parameter's rows together, or by their places; or the norm of a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.model.head.bias.requires_grad_(False)
        self.told_early: list[str] = []

    def configure_optimizers(self) -> Any:
        for use in EARLY_USES:
            try:
                use(self.model.head)
            except ConfigurationError as error:
                self.told_early.append(str(error))
        return super().configure_optimizers()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.told = []
        weight, frozen = self.model.embed.weight, self.model.head.bias
        for use in [*(lambda use=use: use(weight) for use in USES.values()), frozen.norm]:
            try:
                use()
            except StepError as error:
                self.told.append(str(error))


def tell(rank: int) -> tuple[list[str], list[str]]:
    module = train(each([UsesWhole], COPIES, max_steps=1)[0])
    return module.told, module.told_early


def test_functions_that_mix_rows_or_go_by_their_places_are_refused(pool: ProcessPool) -> None:
    for (*told, of_frozen), told_early in pool.run(tell, 2):
        assert len(told_early) == len(EARLY_USES)
        for message in told_early:
            assert "parameter model.head.weight" in message
            assert "configure_optimizers" in message
        for name, message in zip(USES, told, strict=True):
            assert f"{name} is called on parameter" in message, name
        assert "norm is called in a hook on parameter model.head.bias, which is froz" in of_frozen


class Validated(TinyModule):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.model(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        self.log("norms", torch.stack([item.norm() for item in self.parameters()]).sum())


def test_hooks_get_whole_numbers_without_training_too(pool: ProcessPool) -> None:
    check(pool, *each([Validated], STAGES, evaluates=True))


def test_buffers_that_an_evaluation_changes_are_one_devices_or_refused(pool: ProcessPool) -> None:
    check(pool, *each([hooks.Counts], STAGES, options={"num_microbatches": 1}))
    refused(pool, {hooks.Counts: "count changes with what each micro-batch holds"}, STAGES)
