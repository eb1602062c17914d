"""Choose the other nodes that keep a copy of each part, so that losing a node needs no remote.

Each node gives its parts to the nodes that follow it in a ring, and skips a node only if that would
get more than an even share. With equal nodes this is exactly a ring: every node keeps the same
amount, and losing two nodes at once loses a part only if they are neighbours (2 of N-1 pairs for
two replicas); with parts spread over all nodes, any pair would lose some part.
"""

from collections.abc import Collection, Sequence

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["place_replicas"]


def place_replicas(
    node_of_rank: Sequence[str],
    *,
    replicas: int,
    part_bytes: Sequence[int] | None = None,
    leaving: Collection[str] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return for each rank the ranks of other nodes that keep a copy of its part.

    The copies of a part go to different nodes, never to its own or to one that is `leaving`; parts
    of leaving nodes get at least one copy. There are fewer copies if there are too few nodes.

    Args:
        node_of_rank: Name of each rank's node.
        replicas: Nodes that are to hold each part, its own included.
        part_bytes: Size of each rank's part; equal if None.
        leaving: Nodes that are about to be lost.
    """
    if replicas < 1:
        raise ConfigurationError(f"replicas is {replicas}; it must be 1 (no copies) or more.")
    sizes = [1] * len(node_of_rank) if part_bytes is None else list(part_bytes)
    nodes = list(dict.fromkeys(node_of_rank))
    staying = [node for node in nodes if node not in leaving]
    copies = [max(replicas - 1, int(node in leaving)) for node in node_of_rank]
    total = sum(size * count for size, count in zip(sizes, copies, strict=True))
    even_share = total / len(staying) if staying else 0.0
    load = dict.fromkeys(nodes, 0)
    targets: list[tuple[int, ...]] = [()] * len(node_of_rank)
    for rank, node in sorted(enumerate(node_of_rank), key=lambda item: nodes.index(item[1])):
        chosen: list[str] = []
        for _ in range(copies[rank]):
            ring = _ring_after(node, nodes)
            others = [other for other in ring if other in staying and other not in chosen]
            if not others:
                break
            fitting = [n for n in others if load[n] + sizes[rank] <= even_share + 1e-9]
            target = fitting[0] if fitting else min(others, key=load.__getitem__)
            load[target] += sizes[rank]
            chosen.append(target)
        targets[rank] = tuple(_one_rank_of(target, rank, node_of_rank) for target in chosen)
    return tuple(targets)


def _ring_after(node: str, nodes: Sequence[str]) -> list[str]:
    """Return the other nodes in ring order, the next one first."""
    index = nodes.index(node)
    return [*nodes[index + 1 :], *nodes[:index]]


def _one_rank_of(node: str, for_rank: int, node_of_rank: Sequence[str]) -> int:
    ranks = [rank for rank, name in enumerate(node_of_rank) if name == node]
    return ranks[for_rank % len(ranks)]
