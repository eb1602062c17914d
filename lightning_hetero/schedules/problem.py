"""What a schedule is solved for: seconds and bytes of every pass, links, and room for activations.

A stage runs each micro-batch three times: forward (F), the gradient of its input (I) and the
gradients of its weights (W). The stage before waits for I; nobody waits for W.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.errors import PlanError

__all__ = ["Edge", "Matrix", "ScheduleProblem"]

Matrix = tuple[tuple[float, ...], ...]
"""Indexed by stage, then by micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The link between two neighbouring stages, in one direction.

    A message occupies the link for `transfer_s` and arrives `latency_s` after that: a long latency
    delays messages but doesn't limit how many are under way.
    """

    latency_s: float = 0.0
    transfer_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """Seconds after which a message arrives, if the link is free."""
        return self.latency_s + self.transfer_s


@dataclass(frozen=True, kw_only=True)
class ScheduleProblem:
    """One pipeline, one iteration.

    ::

        problem = ScheduleProblem.equal(
            forward_s=(1.0, 1.0), input_s=(1.0, 1.0), weight_s=(1.0, 1.0), num_microbatches=4
        )
        print(solve(problem).end_s)

    Raises:
        PlanError: A stage has no room for one micro-batch.
    """

    forward_s: Matrix
    """Seconds of F."""
    input_s: Matrix
    """Seconds of I; of the whole backward where `weight_s` is zero."""
    weight_s: Matrix
    """Seconds of W; zeros where backward passes aren't split."""
    forward_edges: tuple[Edge, ...]
    """From each stage to the next: one less than stages."""
    backward_edges: tuple[Edge, ...]
    """From each stage's successor back to it: one less than stages."""
    held_bytes: Matrix
    """What a micro-batch keeps on a stage from F to I."""
    waiting_bytes: Matrix
    """What it keeps from I to W."""
    room_bytes: tuple[float, ...]
    """Room for both, by stage."""

    def __post_init__(self) -> None:
        for stage, (room, held) in enumerate(zip(self.room_bytes, self.held_bytes, strict=True)):
            needed = max(held, default=0.0)
            if needed > room * (1 + 1e-9):
                raise PlanError(
                    f"Stage {stage} has room for {room:,.0f} bytes of activations, and one "
                    f"micro-batch needs {needed:,.0f}. Use smaller micro-batches, recompute more "
                    "layers, or give the stage fewer."
                )

    @classmethod
    def equal(  # noqa: PLR0913 - what a pipeline consists of
        cls,
        *,
        forward_s: Sequence[float],
        input_s: Sequence[float],
        weight_s: Sequence[float],
        num_microbatches: int,
        most_held: Sequence[float] = (),
        edges: Sequence[Edge] = (),
        waiting: float = 1.0,
        sizes: Sequence[float] = (),
    ) -> "ScheduleProblem":
        """Return the problem of micro-batches whose activations take one unit a stage.

        Args:
            forward_s: Seconds of F, by stage.
            input_s: Seconds of I.
            weight_s: Seconds of W.
            num_microbatches: Micro-batches of the iteration.
            most_held: Micro-batches that each stage has room for; by default as many as 1F1B
                holds there.
            edges: The links between neighbouring stages, both ways; without delay by default.
            waiting: Share of an activation that W needs after I: about all of a transformer
                layer's, whose linear layers keep their inputs and the gradients of their outputs.
            sizes: Of each micro-batch, where they differ: seconds and units are these times as
                many, and there is room for any `most_held` that follow each other.
        """
        num_stages = len(forward_s)
        each = tuple(sizes) or (1.0,) * num_microbatches
        held = tuple(most_held) or tuple(map(float, range(num_stages, 0, -1)))

        def rows(values: Sequence[float]) -> Matrix:
            return tuple(tuple(value * size for size in each) for value in values)

        def room(most: float) -> float:
            if not sizes:
                return most
            count = min(int(most), len(each))
            return max(sum(each[i : i + count]) for i in range(len(each) - count + 1))

        links = tuple(edges) or (Edge(),) * (num_stages - 1)
        return cls(
            forward_s=rows(forward_s),
            input_s=rows(input_s),
            weight_s=rows(weight_s),
            forward_edges=links,
            backward_edges=links,
            held_bytes=rows([1.0] * num_stages),
            waiting_bytes=rows([waiting if seconds else 0.0 for seconds in weight_s]),
            room_bytes=tuple(map(room, held)),
        )

    @property
    def num_stages(self) -> int:
        """Stages, each of which runs one pass at a time."""
        return len(self.room_bytes)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the iteration."""
        return len(self.forward_s[0])
