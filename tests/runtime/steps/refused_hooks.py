"""Hooks that are refused, each with the function that is named."""

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.toy import TinyModule


def _zero_row(model: nn.Module) -> None:
    model.embed.weight.data[0] = 0.0


def _initialise(draw: Callable[[Tensor], Any], model: Any) -> None:
    draw(model.head.weight)


DOES: dict[str, tuple[str, str, Callable[[Any], Any]]] = {
    "copies the model": ("on_train_start", "deepcopy", copy.deepcopy),
    "saves weights": (
        "on_train_epoch_end",
        "pickling or saving",
        lambda model: torch.save(model.state_dict(), io.BytesIO()),
    ),
    "tells weights": (
        "on_train_epoch_end",
        "getitem",
        lambda model: [float(item.detach().cpu().flatten()[0]) for item in model.parameters()],
    ),
    "zeroes a row": ("on_train_batch_end", "setitem", _zero_row),
    **{
        f"initialises by {told}": (hook, told, partial(_initialise, draw))
        for hook, told, draw in (
            ("on_fit_start", "uniform", nn.init.xavier_uniform_),
            ("on_fit_start", "kaiming_uniform", nn.init.kaiming_uniform_),
            ("on_train_start", "normal", nn.init.orthogonal_),
        )
    },
}
"""Hooks, and which function is refused there."""


class Does(TinyModule):
    """Uses the model in a hook, as one of `DOES`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        hook, _, use = DOES[kind]
        setattr(self, hook, lambda *_: use(self.model))
