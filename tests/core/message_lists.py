"""The messages of a plan, found parameter by parameter and pair by pair of ranks."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.slices import Interval, ParameterSpec, Slice, holdings_of
from lightning_hetero.core.transfers import Message, Piece, unit_of


def list_messages(
    specs: Sequence[ParameterSpec],
    slices: Mapping[str, Sequence[Slice]],
    plan: ParallelPlan,
    rank: int,
    *,
    push: bool,
    trainable_only: bool,
) -> list[Message]:
    """Return what a rank sends, receives or copies in a pull or a push, in the global order."""
    moves: dict[tuple[int, int, int], list[Piece]] = defaultdict(list)
    for spec in specs:
        if trainable_only and not spec.requires_grad:
            continue
        for holding in holdings_of(spec, plan):
            for item in slices[spec.name]:
                if rank not in (item.owner, holding.global_rank):
                    continue
                for interval in holding.pushes if push else holding.intervals:
                    first, last = _overlap(interval, (item.start, item.stop))
                    if first < last:
                        key = unit_of(spec, plan.num_layers), item.owner, holding.global_rank
                        moves[key].append(Piece(spec.name, first, last))
    order = sorted(moves, key=lambda key: (-key[0] if push else key[0], key[1], key[2]))
    return [
        Message(unit, holder, owner, tuple(moves[unit, owner, holder]))
        if push
        else Message(unit, owner, holder, tuple(moves[unit, owner, holder]))
        for unit, owner, holder in order
    ]


def _overlap(a: Interval, b: Interval) -> Interval:
    return max(a[0], b[0]), min(a[1], b[1])
