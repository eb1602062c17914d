"""The ranks of a generation, as Lightning asks for them."""

import os

from lightning.fabric.plugins import ClusterEnvironment
from typing_extensions import override

from lightning_hetero.runtime.generation.cores import share_cores
from lightning_hetero.runtime.generation.records import Generation

__all__ = ["GenerationEnvironment"]


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
