"""Modules that checkpoint their own layers, or change things in place, beside those that don't."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.runtime.huggingface_runs import HuggingFaceCase, HuggingFaceModule, HuggingFaceOutcome
from tests.runtime.huggingface_runs import fit as hugging_face_fit
from tests.runtime.runs import SEED, Case, MaskingModule, Outcome, RowsModule, fit
from tests.toy import GPT, Block


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
