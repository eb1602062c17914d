"""Run a step on copies of what it may change, so that nothing of it is left.

Inside the context each module works with copies of its buffers, tensors, lists, dicts and random
generators, torchmetrics' states among them. Afterwards it has its own again. What a step changes
elsewhere, such as a global, isn't undone: a step counts no calls.
"""

import copy
import pickle
import random
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Spared"]

_TORCHS_OWN = frozenset(vars(nn.Module())) - {"_buffers", "training"}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Spared:
    """The context.

    Args:
        module: The LightningModule.
        evaluates: Whether its parts are in eval mode inside, except batch norms.
    """

    def __init__(self, module: nn.Module, *, evaluates: bool) -> None:
        self._module = module
        self._evaluates = evaluates
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._generators: list[tuple[Any, Any]] = []
        """Each of the module's generators, and the copy in its place."""
        self._copies: dict[int, Any] = {}
        """By the identity of what is copied: what modules share they share inside, too."""

    def __enter__(self) -> Self:
        for part in self._module.modules():
            own = vars(part)
            self._kept.append((own, dict(own)))
            for name, value in self._kept[-1][1].items():
                if name not in _TORCHS_OWN:
                    own[name] = self._copied(value)
            if self._evaluates and not isinstance(part, _BatchNorm):
                own["training"] = False
        return self

    def __exit__(self, *_: object) -> None:
        for own, before in self._kept:
            # New attributes stay, such as Hugging Face's note that it has registered its hooks.
            own.update(before)

    @property
    def has_drawn(self) -> bool:
        """Whether the step has drawn from a generator that the module keeps."""
        return any(_state_of(own) != _state_of(other) for own, other in self._generators)

    def _copied(self, value: Any, depth: int = 2) -> Any:
        if id(value) not in self._copies:
            self._copies[id(value)] = self._copy(value, depth)
        return self._copies[id(value)]

    def _copy(self, value: Any, depth: int) -> Any:
        other: Any
        kind = type(value)
        if kind is Tensor and not value.requires_grad and not value.is_nested:
            return value.clone()
        if depth and kind is list:
            return [self._copied(item, depth - 1) for item in value]
        if depth and kind is dict:
            return {key: self._copied(item, depth - 1) for key, item in value.items()}
        if kind is set:
            return set(value)
        if isinstance(value, _GENERATORS):
            other = copy.deepcopy(value) if kind is not torch.Generator else value.clone_state()  # type: ignore[union-attr]
            self._generators.append((value, other))
            return other
        return value


def _state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    return pickle.dumps(generator).hex()
