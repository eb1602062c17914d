"""Decide how many layers of a stage each micro-batch recomputes in backward.

A recomputed layer keeps only its input, not everything that autograd saves. Only the first layers
of a stage are recomputed: backward reaches them last, when the other layers have been freed and
leave room for the layer that is recomputed. A fixed number of layers after them may be recomputed
*selectively*: they also keep matrix products and attention.

Let micro-batch m have t_m tokens and keep k_m of the stage's n layers; K and R are the bytes per
token of a kept and of a recomputed layer. When its backward begins, with the micro-batches W_m in
flight, m among them, the stage holds at most ::

    sum over j in W_m of t_j·(n·R + k_j·(K - R)),    where k_m counts as 1 if it is 0,

since even a micro-batch that keeps no layer recomputes one at a time. The runtime and the simulator
both use `fewest_recomputed`, so what runs is what was predicted.

Under a budget no layer is recomputed selectively. Micro-batches that must recompute are many times
longer than the others, so they need to recompute whole layers. With selective layers first,
iterations of web documents on five clusters would be only 0.4 to 2.4 % shorter (simulated), and
layers that change a product in place wouldn't be allowed.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from lightning_hetero.core.actions import Action, ActionKind
from lightning_hetero.core.errors import PlanError

_ROUNDING = 1 + 1e-9
"""Factor by which a sum may exceed the budget because of rounding."""

Windows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """The bytes that one layer keeps on one rank between its forward and its backward."""

    kept: float
    """Bytes per token of all that autograd saves."""
    recomputed: float
    """Bytes per token if the layer is recomputed: those of its input."""

    def __post_init__(self) -> None:
        if not 0 <= self.recomputed <= self.kept:
            raise PlanError(
                f"A layer keeps {self.kept} bytes per token and {self.recomputed} if it is "
                "recomputed; the second must be from 0 to the first. Measure them again."
            )


def check_recomputation(
    where: str,
    num_layers: int,
    recomputed_layers: int | None,
    selective_layers: int | None,
    activation_budget_bytes: int | None,
) -> None:
    """Check a stage's settings of recomputation; error messages call the stage `where`.

    Raises:
        PlanError: A number is out of range, or a budget is given beside numbers.
    """
    recomputed, selective = recomputed_layers, selective_layers
    budget, left = activation_budget_bytes, num_layers - (recomputed_layers or 0)
    if budget is not None and (recomputed is not None or selective is not None):
        raise PlanError(
            f"{where} has recomputed_layers {recomputed}, selective_layers {selective} and "
            f"activation_budget_bytes {budget}. Give one of them, numbers or a budget: it decides "
            "how many layers each micro-batch recomputes."
        )
    if recomputed is not None and not 0 <= recomputed <= num_layers:
        raise PlanError(
            f"{where} has recomputed_layers {recomputed} of {num_layers} layers. Give 0 (none) to "
            f"{num_layers} (all)."
        )
    if selective is not None and not 0 <= selective <= left:
        raise PlanError(
            f"{where} has selective_layers {selective}, but {left} of {num_layers} layers aren't "
            f"recomputed as a whole. Give 0 (none) to {left}."
        )
    if budget is not None and budget < 1:
        raise PlanError(
            f"{where} has activation_budget_bytes {budget}; it must be 1 or more, or left out."
        )


def describe_recomputation(
    recomputed_layers: int | None,
    selective_layers: int | None,
    activation_budget_bytes: int | None,
) -> str:
    """Return a stage's settings of recomputation in words; "" if there are none."""
    if activation_budget_bytes is not None:
        return f"within {_gib(activation_budget_bytes)}"
    parts = []
    if recomputed_layers is not None and (recomputed_layers or not selective_layers):
        parts.append(f"{recomputed_layers} layer{'s' if recomputed_layers != 1 else ''}")
    if selective_layers:
        parts.append(f"{selective_layers} selectively")
    return ", ".join(parts)


@lru_cache(maxsize=256)
def held_at_backward(schedule: tuple[Action, ...]) -> Windows:
    """Return for each backward the micro-batches in flight when it begins, its own first.

    If a backward is split, its micro-batch is in flight until the gradients of its weights are
    done.
    """
    held: dict[int, None] = {}
    windows = []
    for action in schedule:
        index = action.microbatch_index
        if action.kind is ActionKind.FORWARD:
            held[index] = None
            continue
        if action.kind is not ActionKind.WEIGHT:
            windows.append((index, *(other for other in held if other != index)))
        if action.kind is not ActionKind.INPUT:
            del held[index]
    return tuple(windows)


def peak_activation_bytes(
    layer: LayerBytes,
    num_layers: int,
    tokens: Sequence[int],
    recomputed: Sequence[int],
    windows: Windows,
) -> float:
    """Return the largest number of bytes of its layers' activations that a stage holds at once.

    Args:
        layer: Bytes of each layer.
        num_layers: Layers of the stage.
        tokens: Tokens of each micro-batch.
        recomputed: Layers that each micro-batch recomputes.
        windows: `held_at_backward` of the stage's schedule.
    """
    stage = _Stage(layer, num_layers, tokens, windows)
    return stage.peak([num_layers - count for count in recomputed])


def fewest_recomputed(
    budget_bytes: float,
    layer: LayerBytes,
    num_layers: int,
    tokens: Sequence[int],
    windows: Windows,
) -> tuple[int, ...]:
    """Return how many layers each micro-batch recomputes so that a stage stays within a budget.

    Layers are kept one after another, each by the micro-batch that then keeps the fewest bytes, as
    long as no window exceeds the budget. So long micro-batches recompute most, short ones nothing,
    and equal ones differ by at most one layer. ::

        schedule = schedule_1f1b(stage_index=0, num_stages=2, num_microbatches=3)
        layer = LayerBytes(kept=34.0, recomputed=2.0)
        fewest_recomputed(400_000, layer, 4, (1000, 4000, 500), held_at_backward(schedule))

    Args:
        budget_bytes: Upper limit on the activations of all micro-batches together on each rank.
        layer: Bytes of each layer.
        num_layers: Layers of the stage.
        tokens: Tokens of each micro-batch, in the order in which they run.
        windows: `held_at_backward` of the stage's schedule.

    Raises:
        PlanError: The budget is too small for the inputs of all layers and one recomputed layer.
    """
    stage = _Stage(layer, num_layers, tokens, windows)
    nothing, everything = [0] * len(tokens), [num_layers] * len(tokens)
    room = budget_bytes * _ROUNDING
    if stage.peak(everything) <= room:
        return tuple(nothing)
    needed = stage.peak(nothing)
    if needed > room:
        raise PlanError(
            f"An activation budget of {_gib(budget_bytes)} holds not even one recomputed layer: "
            f"with all {num_layers} layers recomputed, the stage keeps up to {_gib(needed)} of "
            f"micro-batches of up to {max(tokens):,} tokens. Set activation_budget_bytes to "
            f"{int(needed) + 1:,} or more, or give the stage fewer layers or shorter micro-batches."
        )
    kept = nothing
    queue = [(cost, m) for m, cost in enumerate(stage.costs)]
    heapq.heapify(queue)
    while queue:
        _, m = heapq.heappop(queue)
        if kept[m] == num_layers:
            continue
        kept[m] += 1
        if stage.peak(kept, around=m) > room:
            kept[m] -= 1  # There won't be room later either, since windows only get fuller.
        else:
            heapq.heappush(queue, ((kept[m] + 1) * stage.costs[m], m))
    return tuple(num_layers - count for count in kept)


class _Stage:
    """Counts the bytes of activations in the windows of one stage."""

    def __init__(
        self, layer: LayerBytes, num_layers: int, tokens: Sequence[int], windows: Windows
    ) -> None:
        self.costs = [count * (layer.kept - layer.recomputed) for count in tokens]
        """Bytes that each micro-batch needs to keep one more layer."""
        self._inputs = [count * num_layers * layer.recomputed for count in tokens]
        self._windows = windows
        self._around: list[list[tuple[int, ...]]] = [[] for _ in tokens]
        for window in windows:
            for m in window:
                self._around[m].append(window)

    def peak(self, kept: Sequence[int], *, around: int | None = None) -> float:
        """Return the largest number of bytes held in any window.

        Args:
            kept: Layers that each micro-batch keeps.
            around: Consider only windows that contain this micro-batch; None: all.
        """
        windows = self._windows if around is None else self._around[around]
        costs, inputs = self.costs, self._inputs
        return max(
            (
                sum(inputs[m] + kept[m] * costs[m] for m in window)
                + (0 if kept[window[0]] else costs[window[0]])
                for window in windows
            ),
            default=0.0,
        )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
