"""Runs of modules whose steps compute with parameters themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import HeteroError
from tests.runtime.runs import pipeline, plan_of, stage
from tests.toy import ToyModule, ToyOptions, loader, quiet
from tests.without_check import WITHOUT_CHECK

TP_PLAN = {"model.blocks.*.up": "colwise", "model.blocks.*.down": "rowwise"}


@dataclass(frozen=True, kw_only=True)
class WeightCase:
    """What a step adds to its loss, and the plan; without one, on a single device."""

    penalty: str
    """ "before" the model: of all parameters; "behind" it: the same; a "layer"'s, by its index."""
    plan: dict[str, Any] | None = None
    ownership: str = "even"
    layer: int = 0


class Penalised(ToyModule):
    def __init__(self, case: WeightCase) -> None:
        super().__init__(ToyOptions(optimizer="sgd"))
        self.case = case

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty: Any = 0.0
        if self.case.penalty == "before":
            penalty = sum(p.square().sum() for p in self.parameters())
        loss = self.loss(batch)
        if self.case.penalty == "behind":
            penalty = torch.stack([p.square().sum() for p in self.parameters()]).sum()
        if self.case.penalty == "layer":
            penalty = self.model.blocks[self.case.layer].up.weight.abs().sum()
        return loss + 1e-2 * penalty


def penalise(rank: int, case: WeightCase) -> list[float] | str:
    """Return the losses, or the refusal."""
    torch.manual_seed(0)
    module, options, batch_size = Penalised(case), quiet(devices=1, max_steps=4), 8
    if case.plan is not None:
        strategy = HeteroStrategy(
            ParallelPlan.from_dict(case.plan), ownership=case.ownership, tp_plan=TP_PLAN
        )
        options |= {"strategy": strategy, "devices": 2}
        batch_size //= len(case.plan["pipelines"])
    try:
        L.Trainer(**options).fit(module, loader(64, batch_size))
    except HeteroError as error:
        return f"{type(error).__name__}: {error}"
    return module.losses


TWO = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3), num_microbatches=2))
COPIES = plan_of(
    pipeline(stage(0, 0, 3), num_microbatches=2), pipeline(stage(1, 0, 3), num_microbatches=1)
)
SHARDED = plan_of(pipeline(stage([0, 1], 0, 3), num_microbatches=1))


class Seen(TorchFunctionMode):
    """Notes the names of torch's functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


class Watched(ToyModule):
    def __init__(self) -> None:
        super().__init__(ToyOptions())
        self.seen = Seen()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.seen:
            return self.loss(batch)


def functions_seen(rank: int, plan: dict[str, Any] | None) -> set[str]:
    """Return the torch functions that a step's own watch sees."""
    torch.manual_seed(0)
    options = quiet(devices=1, max_steps=4)
    if plan is not None:
        options |= {"strategy": HeteroStrategy(ParallelPlan.from_dict(plan)), "devices": 2}
    module = Watched()
    with WITHOUT_CHECK:
        L.Trainer(**options).fit(module, loader(64, 4))
    return module.seen.names
