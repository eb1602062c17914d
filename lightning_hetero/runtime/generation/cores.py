"""Share a machine's cores out among the processes of a run on it, unless the user has done so.

Two threads for each of four processes on two cores make an iteration take three times as long: idle
threads spin. A process that joins a run is started by itself, and so takes all cores for its own.
With each generation ranks learn how many of them run on their machine.
"""

import os

import torch
from lightning.fabric.utilities.distributed import (
    _set_num_threads_if_needed,
    _suggested_max_num_threads,
)

__all__ = ["share_cores", "take_cores"]

_NUM_THREADS = "OMP_NUM_THREADS"
_SHARED = "LIGHTNING_HETERO_SHARES_CORES"
"""Set where the number of threads isn't the user's."""


def take_cores(num_processes: int) -> None:
    """Take a process's part of the cores, of as many processes as its node starts."""
    if _NUM_THREADS not in os.environ:
        os.environ[_SHARED] = "1"
    _set_num_threads_if_needed(num_processes=num_processes)


def share_cores(num_ranks: int) -> None:
    """Give cores up to the other ranks of the machine, once it is known how many there are.

    Args:
        num_ranks: All ranks of the run that are on this machine, this process's among them.
    """
    num_threads = _suggested_max_num_threads(num_ranks)
    if _SHARED in os.environ and num_threads < torch.get_num_threads():
        torch.set_num_threads(num_threads)
        os.environ[_NUM_THREADS] = str(num_threads)
