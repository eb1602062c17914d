"""Seed the generators of torch, NumPy and Python by what must not depend on the plan."""

import hashlib
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "PreservedRandomState",
    "RandomState",
    "TorchState",
    "seed_everything",
    "seed_of",
    "seed_torch",
]


def seed_of(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part and on their order."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_torch(seed: int) -> None:
    """Seed torch's generators, on CPU and on the current CUDA device."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class TorchState(NamedTuple):
    """The states of torch's generators that `seed_torch` seeds."""

    cpu: Tensor
    cuda: Tensor | None
    """Of the current device, once CUDA is used."""

    @classmethod
    def now(cls) -> "TorchState":
        """Return the states as they are."""
        has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if has_cuda else None)

    def put_back(self) -> None:
        """Make them so again."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)


class RandomState(NamedTuple):
    """The states of all generators of this process, on all of its devices."""

    torch: Tensor
    cuda: list[Tensor]
    """Of each device; none without CUDA."""
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> "RandomState":
        """Return the states as they are."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RandomState":
        """Return what `to_dict` was called of."""
        kind, keys, *rest = data["numpy"]
        version, numbers, gauss = data["python"]
        return cls(
            data["torch"],
            data.get("cuda", []),
            (kind, keys.numpy().astype(np.uint32), *rest),
            (version, tuple(numbers), gauss),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return what can be saved without pickle: no arrays."""
        kind, keys, *rest = self.numpy
        numpy = (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
        state = {"torch": self.torch, "python": self.python, "numpy": numpy}
        return state | ({"cuda": self.cuda} if self.cuda else {})

    def put_back(self) -> None:
        """Make them so again; those of CUDA where there are as many devices."""
        torch.set_rng_state(self.torch)
        if self.cuda and len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class PreservedRandomState:
    """Leaves the generators of torch, NumPy and Python as they were found before this context."""

    def __enter__(self) -> None:
        self._python, self._numpy = random.getstate(), np.random.get_state()
        self._torch = TorchState.now()

    def __exit__(self, *_: object) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        self._torch.put_back()
