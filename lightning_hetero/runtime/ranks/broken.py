"""Tell whether an error comes from a broken connection to another rank."""

from torch import OutOfMemoryError
from torch.distributed import DistError

from lightning_hetero.core.errors import HeteroError

__all__ = ["is_broken_connection"]

_OWN_MEMORY = ("out of memory", "Failed to CUDA calloc", "Failed to CUDA host alloc")
"""Texts of NCCL's errors about memory on this rank's own device: no peer has failed."""


def is_broken_connection(error: Exception) -> bool:
    """Whether an error comes from a communicator, not from this rank's own code or memory."""
    text = str(error)
    if isinstance(error, OutOfMemoryError) or any(word in text for word in _OWN_MEMORY):
        return False
    if isinstance(error, DistError):
        return True
    if isinstance(error, HeteroError) or not isinstance(error, RuntimeError):
        return False
    return "gloo" in text or "NCCL" in text or "Connection closed by peer" in text
