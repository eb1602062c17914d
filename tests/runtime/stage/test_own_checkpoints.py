"""A model that checkpoints its own layers, or changes their input in place, trains as it should."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.huggingface_runs import HuggingFaceCase, HuggingFaceModule, HuggingFaceOutcome
from tests.runtime.huggingface_runs import fit as hugging_face_fit
from tests.runtime.runs import (
    SEED,
    Case,
    MaskingModule,
    Outcome,
    RowsModule,
    assert_same_bits,
    assert_same_training,
    fit,
    pipeline,
    plan_of,
    stage,
)
from tests.runtime.test_huggingface import assert_same
from tests.toy import GPT, Block

pytestmark = pytest.mark.dist


class CheckpointedGPT(GPT):
    """Computes its activations again in backward, in parts that a user may choose."""

    how = "layers"

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "model":
            out: Tensor = checkpoint(super().forward, ids, use_reentrant=False)
            return out
        x = self.wte(ids) + self.wpe[: ids.shape[1]]
        length = 2 if self.how == "pairs" else 1
        for first in range(0, len(self.blocks), length):
            part = nn.Sequential(*self.blocks[first : first + length])
            x = checkpoint(part, x, use_reentrant=self.how == "reentrant")
        head: Tensor = self.head(self.ln_f(x))
        return head


class CheckpointedModule(MaskingModule):
    """Draws random numbers everywhere, and checkpoints as it is told; "none" leaves it out."""

    def __init__(self, case: Case, how: str) -> None:
        super().__init__(case)
        if how != "none":
            self.model.__class__ = CheckpointedGPT
            self.model.how = how


def train_checkpointed_llama(
    rank: int, case: HuggingFaceCase
) -> tuple[HuggingFaceOutcome, HuggingFaceOutcome]:
    """Train a case without checkpoints, then with one around each layer."""
    L.seed_everything(SEED, verbose=False)
    plain = hugging_face_fit(HuggingFaceModule(case), case)
    L.seed_everything(SEED, verbose=False)
    module = HuggingFaceModule(case)
    layers = module.model.model.layers
    kind = type("Checkpointed", (_CheckpointedCall, type(layers[0])), {})
    for layer in layers:
        layer.__class__ = kind
    return plain, hugging_face_fit(module, case)


class _CheckpointedCall(nn.Module):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.leaky_relu_(x, 0.5))


def train_in_place(rank: int, case: Case) -> Outcome:
    """Train layers that change their input in place."""
    L.seed_everything(SEED, verbose=False)
    module = RowsModule(case)
    for block in module.model.blocks:
        block.__class__ = InPlaceBlock
    return fit(module, case)


class SharingBlock(nn.Module):
    """Computes the same in two older checkpoints, so that a gradient comes in two parts."""

    def __init__(self, linear: nn.Linear, *, owns: bool) -> None:
        super().__init__()
        self.own = linear if owns else nn.Linear(linear.in_features, linear.out_features)
        self.used = [linear]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + torch.tanh(checkpoint(self.used[0].forward, self.own(x), use_reentrant=True))
        return x


def train_sharing(rank: int, case: Case, whose: str) -> Outcome:
    """Train blocks whose parameters get their gradients in parts."""
    L.seed_everything(SEED, verbose=False)
    module = RowsModule(case)
    width, owns = case.width, whose == "each block's"
    module.model.shared = nn.Linear(width, width)
    for index in range(case.num_layers):
        linear = nn.Linear(width, width) if owns else module.model.shared
        module.model.blocks[index] = SharingBlock(linear, owns=owns)
    return fit(module, case)


def train_checkpointed(rank: int, case: Case, hows: tuple[str, ...]) -> dict[str, Outcome]:
    """Train a case once for each way of checkpointing."""
    outcomes = {}
    for how in hows:
        L.seed_everything(SEED, verbose=False)
        outcomes[how] = fit(CheckpointedModule(case, how), case)
    return outcomes


def refused_checkpoints(rank: int, case: Case) -> str:
    """Return what stops a module that checkpoints in the older way."""
    try:
        train_checkpointed(rank, case, ("reentrant",))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


__all__ = [
    "refused_checkpoints",
    "train_checkpointed",
    "train_checkpointed_llama",
    "train_in_place",
    "train_sharing",
]


CASE = Case(
    plan=plan_of(
        pipeline(stage(2, 0, 1), stage(0, 1, 2), stage(2, 2, 3), num_microbatches=3),
        pipeline(stage(1, 0, 3), num_microbatches=1),
    ),
    world_size=3,
    batch_size=4,
    num_rows=16,
)
TWO_LAYERS = plan_of(
    pipeline(stage(2, 0, 1), stage(0, 1, 3), num_microbatches=3), *CASE.plan["pipelines"][1:]
)
ONE_STAGE = replace(
    CASE, plan=plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3))), world_size=2
)


@pytest.mark.parametrize("options", [(), (("activation_checkpointing", 2),)])
@pytest.mark.parametrize("plan", [CASE.plan, TWO_LAYERS], ids=["chunks", "stages"])
def test_own_checkpoints_change_no_bit_of_training(
    pool: ProcessPool, plan: Any, options: tuple[tuple[str, object], ...]
) -> None:
    case = replace(CASE, plan=plan, options=options)
    for outcomes in pool.run(train_checkpointed, 3, case, ("none", "layers", "pairs", "model")):
        for outcome in outcomes.values():
            assert_same_bits([outcome], [outcomes["none"]])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_own_checkpoints_change_nothing_under_tensor_parallelism(
    pool: ProcessPool, *, sequence_parallel: bool
) -> None:
    case = HuggingFaceCase(
        model="llama",
        plan=plan_of(pipeline(stage([0, 1], 0, 1), stage([2, 3], 1, 4))),
        world_size=4,
        num_rows=8,
        config=(("attention_dropout", 0.3),),
        options=(("sequence_parallel", sequence_parallel),),
    )
    for plain, checkpointed in pool.run(train_checkpointed_llama, 4, case):
        assert_same(checkpointed, plain, 1e-6)


def test_older_checkpoints_change_no_bit_of_plans_with_one_stage(pool: ProcessPool) -> None:
    for outcomes in pool.run(train_checkpointed, 2, ONE_STAGE, ("none", "layers", "reentrant")):
        for outcome in outcomes.values():
            assert_same_bits([outcome], [outcomes["none"]])


def test_older_checkpoints_are_refused_in_stages_by_name(pool: ProcessPool) -> None:
    for refusal in pool.run(refused_checkpoints, 3, CASE):
        assert "use_reentrant=False" in refusal


def test_layers_may_change_their_input_in_place(pool: ProcessPool) -> None:
    case = replace(CASE, optimizer="sgd", num_rows=32)
    expected = pool.run(train_in_place, 1, case.on_single_device())[0]
    for outcome in pool.run(train_in_place, 3, case):
        assert_same_training(outcome, expected)


def test_gradients_that_older_checkpoints_make_in_parts_are_whole_or_refused(
    pool: ProcessPool,
) -> None:
    case = replace(ONE_STAGE, optimizer="sgd", clip_val=0.1)
    expected = pool.run(train_sharing, 1, case.on_single_device(), "the model's")[0]
    for outcome in pool.run(train_sharing, 2, case, "the model's"):
        assert_same_training(outcome, expected)
    # Blocks so small that they travel together are sent after the last part.
    expected = pool.run(train_sharing, 1, case.on_single_device(), "each block's")[0]
    for outcome in pool.run(train_sharing, 2, case, "each block's"):
        assert_same_training(outcome, expected)
    with pytest.raises(ProcessFailed, match="comes in several parts"):
        pool.run(train_sharing, 2, replace(case, width=64), "each block's")
