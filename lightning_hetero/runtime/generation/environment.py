"""The ranks of a generation, as Lightning asks for them, and their parts of a machine's cores.

Two threads for each of four processes on two cores make an iteration take three times as long: idle
threads spin. A process that joins a run is started by itself, and so takes all cores for its own.
With each generation ranks learn how many of them run on their machine. A number of threads that the
user has set stays.
"""

import os

import torch
from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_hetero.runtime.generation.records import Generation

__all__ = ["GenerationEnvironment", "share_cores", "take_cores"]

_NUM_THREADS = "OMP_NUM_THREADS"
_SHARED = "LIGHTNING_HETERO_SHARES_CORES"
"""Set where the number of threads isn't the user's."""


def take_cores(num_processes: int) -> None:
    """Take a process's part of the cores, of as many processes as its node starts."""
    if _NUM_THREADS not in os.environ:
        os.environ[_SHARED] = "1"
        _use_threads(_part_of_cores(num_processes))


def share_cores(num_ranks: int) -> None:
    """Give cores up to the other ranks of the machine, once it is known how many there are.

    Args:
        num_ranks: All ranks of the run that are on this machine, this process's among them.
    """
    num_threads = _part_of_cores(num_ranks)
    if _SHARED in os.environ and num_threads < torch.get_num_threads():
        _use_threads(num_threads)


def _part_of_cores(num_processes: int) -> int:
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


def _use_threads(num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    os.environ[_NUM_THREADS] = str(num_threads)


class GenerationEnvironment(ClusterEnvironment):
    """The ranks of a generation, for Lightning; and in `os.environ`, for others that look there.

    Making it leaves other ranks of the machine their part of its cores.

    Args:
        first: What described the processes when they were started.
        generation: Who trains together.
        number: This process's number as a member.
    """

    def __init__(self, first: ClusterEnvironment, generation: Generation, number: int) -> None:
        before = first if isinstance(first, GenerationEnvironment) else None
        self.first: ClusterEnvironment = first if before is None else before.first
        self.device_index: int = first.local_rank() if before is None else before.device_index
        """Index of this process's device on its node; unlike the local rank it never changes."""
        rank = generation.rank_of(number)
        assert rank is not None
        nodes = list(dict.fromkeys(item.node for item in generation.members))
        self._global_rank, self._world_size = rank, generation.world_size
        self._local_rank = generation.local_rank_of(rank)
        own_node = generation.members[rank].node
        self._node_rank = nodes.index(own_node)
        share_cores(sum(item.node == own_node for item in generation.members))
        os.environ |= {
            "RANK": str(self._global_rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": str(self._local_rank),
        }

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return self.first.main_address

    @property
    @override
    def main_port(self) -> int:
        return self.first.main_port

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return self._world_size

    @override
    def set_world_size(self, size: int) -> None: ...

    @override
    def global_rank(self) -> int:
        return self._global_rank

    @override
    def set_global_rank(self, rank: int) -> None: ...

    @override
    def local_rank(self) -> int:
        return self._local_rank

    @override
    def node_rank(self) -> int:
        return self._node_rank
