"""Seed, save and restore the generators of torch, NumPy and Python, independently of the plan."""

import hashlib
import pickle
import random
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.fabric.utilities.seed import reset_seed
from torch import Tensor

_HAS_CUDA = torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]


def seed_of(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part and on their order."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seeds_of(count: int, *parts: int) -> tuple[int, ...]:
    """Return `count` such seeds, much faster than as many calls of `seed_of`."""
    text = ",".join(map(str, parts)).encode()
    drawn = struct.unpack(f">{count}Q", hashlib.shake_128(text).digest(8 * count))
    return tuple([seed >> 1 for seed in drawn])


def seed_torch(seed: int) -> None:
    """Seed torch's generators, on CPU and on the current CUDA device."""
    torch.default_generator.manual_seed(seed)
    if _HAS_CUDA and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(seed)


def seed_everything(seed: int) -> None:
    """Seed torch, Python and NumPy."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


class GlobalSeed:
    """The generators' state at the beginning of a fit, after Lightning's `reset_seed`.

    It is kept because a member of a run that outlives ranks begins many fits, and torch's
    `manual_seed` takes milliseconds for each kind of device that doesn't exist.
    """

    def __init__(self) -> None:
        self._seeded: RandomState | None = None

    def put_back(self, *, again: bool) -> None:
        """Seed as at a process's start; `again` restores the state of the last time."""
        if again and self._seeded is not None:
            self._seeded.put_back()
            return
        reset_seed()
        self._seeded = RandomState.now()


class RandomState(NamedTuple):
    """The states of all generators of this process, on all of its devices."""

    torch: Tensor
    cuda: list[Tensor]
    """One state per device; empty until CUDA is used."""
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> "RandomState":
        """Return the states as they are."""
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if is_used else []
        return cls(torch.get_rng_state(), cuda, np.random.get_state(), random.getstate())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "RandomState":
        """Return the state from which `to_dict` made `data`."""
        kind, keys, *rest = data["numpy"]
        version, numbers, gauss = data["python"]
        return cls(
            data["torch"],
            data.get("cuda", []),
            (kind, keys.numpy().astype(np.uint32), *rest),
            (version, tuple(numbers), gauss),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the state in a form that can be saved without pickle: no NumPy arrays."""
        kind, keys, *rest = self.numpy
        numpy = (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
        state = {"torch": self.torch, "python": self.python, "numpy": numpy}
        return state | ({"cuda": self.cuda} if self.cuda else {})

    def put_back(self) -> None:
        """Restore these states; those of CUDA only if the number of devices is the same."""
        torch.set_rng_state(self.torch)
        if self.cuda and len(self.cuda) == torch.cuda.device_count():
            torch.cuda.set_rng_state_all(self.cuda)
        np.random.set_state(self.numpy)
        random.setstate(self.python)

    def has_changed(self) -> bool:
        """Whether anything was drawn or seeded since then."""
        now = RandomState.now()
        same = pickle.dumps((self.numpy, self.python)) == pickle.dumps((now.numpy, now.python))
        return not (
            same and all(map(torch.equal, (self.torch, *self.cuda), (now.torch, *now.cuda)))
        )


class PreservedRandomState:
    """A context that leaves torch's, NumPy's and Python's generators as they were before it."""

    def __enter__(self) -> None:
        self._before = RandomState.now()

    def __exit__(self, *_: object) -> None:
        self._before.put_back()
