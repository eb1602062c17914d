"""What a schedule is solved for: seconds and bytes of every pass, links, and room for activations.

A pipeline is cut into *chunks*, runs of layers in the order in which a micro-batch passes them. A
stage computes one chunk, or several where chunks are interleaved. Micro-batch m passes chunk c three
times: forward (F), the gradient of its input (I) and the gradients of its weights (W). The chunk
before waits for I, nobody waits for W.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_hetero.core.errors import PlanError

__all__ = ["Edge", "ScheduleProblem"]

Matrix = tuple[tuple[float, ...], ...]
"""Indexed by chunk, then by micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """The link between two neighbouring chunks, in one direction.

    A message occupies the link for `transfer_s` and arrives `latency_s` after that, so a long latency
    delays messages but doesn't limit how many are under way.
    """

    latency_s: float = 0.0
    transfer_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ScheduleProblem:
    """One pipeline, one iteration.

    Example with two stages and four equal micro-batches::

        problem = ScheduleProblem.equal(
            forward_s=(1.0, 1.0), input_s=(1.0, 1.0), weight_s=(1.0, 1.0),
            num_microbatches=4, depth=(2.0, 2.0),
        )
        print(solve(problem))
    """

    forward_s: Matrix
    """Seconds of F."""
    input_s: Matrix
    """Seconds of I; of the whole backward where `weight_s` is zero."""
    weight_s: Matrix
    """Seconds of W; zeros where backward passes aren't split."""
    stage_of: tuple[int, ...]
    """For each chunk the stage that computes it."""
    forward_edges: tuple[Edge, ...]
    """From each chunk to the next: one less than chunks."""
    backward_edges: tuple[Edge, ...]
    """From each chunk's successor back to it: one less than chunks."""
    held_bytes: Matrix
    """What a micro-batch keeps on a chunk between F and I."""
    waiting_bytes: Matrix
    """What it keeps between I and W."""
    room_bytes: tuple[float, ...]
    """Room for both on each stage."""

    def __post_init__(self) -> None:
        for stage, room in enumerate(self.room_bytes):
            needed = max(
                (
                    max(row)
                    for chunk, row in enumerate(self.held_bytes)
                    if self.stage_of[chunk] == stage
                ),
                default=0.0,
            )
            if needed > room * (1 + 1e-12):
                raise PlanError(
                    f"Stage {stage} has room for {room:,.0f} bytes of activations, and one "
                    f"micro-batch needs {needed:,.0f}. Use smaller micro-batches, recompute more "
                    "layers, or give the stage fewer."
                )

    @classmethod
    def equal(  # noqa: PLR0913 - what an ordinary pipeline consists of
        cls,
        *,
        forward_s: Sequence[float],
        input_s: Sequence[float],
        weight_s: Sequence[float],
        num_microbatches: int,
        depth: Sequence[float],
        edges: Sequence[Edge] | None = None,
        waiting: float = 0.5,
        stage_of: Sequence[int] | None = None,
    ) -> "ScheduleProblem":
        """Return the problem of equal micro-batches whose activations take one unit a chunk.

        Args:
            forward_s, input_s, weight_s: Seconds of a micro-batch on each chunk.
            num_microbatches: Micro-batches of the iteration.
            depth: Micro-batches that each stage has room for.
            edges: The links between neighbouring chunks, the same in both directions.
            waiting: Share of an activation that W still needs after I.
            stage_of: Each chunk's stage; one chunk a stage by default.
        """
        num_chunks = len(forward_s)

        def rows(values: Sequence[float]) -> Matrix:
            return tuple((value,) * num_microbatches for value in values)

        links = (Edge(),) * (num_chunks - 1) if edges is None else tuple(edges)
        return cls(
            forward_s=rows(forward_s),
            input_s=rows(input_s),
            weight_s=rows(weight_s),
            stage_of=tuple(range(num_chunks) if stage_of is None else stage_of),
            forward_edges=links,
            backward_edges=links,
            held_bytes=rows([1.0] * num_chunks),
            waiting_bytes=rows([waiting if seconds else 0.0 for seconds in weight_s]),
            room_bytes=tuple(depth),
        )

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks that a stage computes."""
        return tuple(chunk for chunk, owner in enumerate(self.stage_of) if owner == stage)

    def work_s(self, chunk: int) -> float:
        """Return the seconds of all passes through a chunk."""
        return sum(self.forward_s[chunk]) + sum(self.input_s[chunk]) + sum(self.weight_s[chunk])

    @property
    def num_chunks(self) -> int:
        """Runs of layers of the pipeline."""
        return len(self.stage_of)

    @property
    def num_stages(self) -> int:
        """Stages, each of which computes one action at a time."""
        return len(self.room_bytes)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the iteration."""
        return len(self.forward_s[0])
