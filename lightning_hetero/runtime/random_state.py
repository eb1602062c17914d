"""Seed the generators of torch, NumPy and Python by what must not depend on the plan."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

__all__ = ["preserved_random_state", "seed_everything", "seed_of", "seed_torch"]


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


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leave the generators of torch, NumPy and Python as they were found."""
    python, numpy, torch_cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state() if has_cuda else None
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torch_cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
