"""What a stage's seconds and bytes depend on: its shape, and the bytes per parameter of states."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from lightning_hetero.core.devices import Arithmetic
from lightning_hetero.exchange.transfers import ExchangeKind

PRECISIONS = {
    "bf16-mixed": (Arithmetic.BF16, 2, 4, 4, 16),
    "bf16-true": (Arithmetic.BF16, 2, 4, 2, 8),
    "16-mixed": (Arithmetic.FP16, 2, 4, 4, 16),
    "16-true": (Arithmetic.FP16, 2, 4, 2, 8),
    "32-true": (Arithmetic.FP32, 4, 4, 4, 16),
}
"""For each precision: the format of matrix products, and the bytes per parameter of weights, of
summed gradients, of masters, and of everything that an owner keeps."""


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Bytes per parameter, and which ranks keep them: by default owners of slices."""

    arithmetic: Arithmetic | None = None
    """The format that matrix products are computed in; None is bf16 or fp32, by `weight_bytes`."""
    weight_bytes: int = 2
    """Weights a holder computes with, bytes per parameter; this is what a pull moves."""
    gradient_bytes: int = 2
    """Gradients on their way to their owners, bytes per parameter; this is what a push moves."""
    summed_bytes: int = 4
    """Gradients that a holder sums over its micro-batches, bytes per parameter."""
    master_bytes: int = 4
    """Master weights, bytes per owned parameter; a part of `owned_bytes`."""
    owned_bytes: int = 16
    """Master weight, two Adam moments and summed gradient in fp32, bytes per owned parameter."""
    activation_factor: float = 1.0
    """Factor on the predicted bytes of micro-batches; above 1 if a run has needed more than
    predicted."""
    selective: bool = True
    """Whether layers may keep matrix products and attention alone; compiled ones can't."""
    host_owned: bool = False
    """Whether every rank keeps what it owns in its host's memory."""
    sharded: bool = True
    """Whether the holders of a layer share ownership; if not, each owns everything that it holds,
    gradients are all-reduced around a ring and no weights are pulled."""
    exchange: ExchangeKind = ExchangeKind.AUTO
    """How holders that share ownership exchange; see `simulator.exchange`."""
    redundancy: int = 0
    """Standbys of each slice, 0 or 1: they keep and push what owners do, and pull nothing."""
    overlap: bool = True
    """Whether gradients leave layer by layer during the last backward, or all after it."""
    blocking_messages: bool = False
    """Whether both stages stand still while an activation travels, as in frameworks that send and
    receive on the computing stream."""

    @property
    def computes_in(self) -> Arithmetic:
        """The format that matrix products are computed in."""
        default = Arithmetic.BF16 if self.weight_bytes == 2 else Arithmetic.FP32
        return self.arithmetic or default

    @property
    def is_owned_by_room(self) -> bool:
        """Whether the room on devices may decide which rank owns what."""
        return self.sharded and not self.host_owned

    @property
    def num_copies(self) -> int:
        """Number of ranks that keep each slice: its owner and its standby."""
        return 1 + self.redundancy if self.sharded else 1

    @property
    def pushed_bytes(self) -> int:
        """Gradients on their way to the owner and the standby of a slice, bytes per parameter."""
        return self.gradient_bytes * self.num_copies

    @property
    def pulls_into_views(self) -> bool:
        """Whether slices may be views of compute weights, into which nothing is gathered.

        With standbys only, and masters as wide as weights.
        """
        return self.redundancy > 0 and self.master_bytes == self.weight_bytes

    @property
    def kept_bytes(self) -> int:
        """The states on the owner and the standby of a slice together, bytes per parameter."""
        return self.owned_bytes * self.num_copies

    @property
    def device_kept_bytes(self) -> int:
        """The part of `kept_bytes` that is on devices, bytes per parameter."""
        return 0 if self.host_owned else self.kept_bytes

    @classmethod
    def of_precision(cls, precision: str, *, redundancy: int = 0) -> Self:
        """Return the layout of a run with the Trainer's `precision` and an Adam optimizer."""
        arithmetic, weight, summed, master, owned = PRECISIONS[precision]
        return cls(
            arithmetic=arithmetic,
            weight_bytes=weight,
            gradient_bytes=weight,
            summed_bytes=summed,
            master_bytes=master,
            owned_bytes=owned,
            redundancy=redundancy,
        )

    @classmethod
    def replicated(cls, *, blocking_messages: bool = False) -> Self:
        """Return the layout of mixed-precision data parallelism without sharding."""
        return cls(sharded=False, overlap=False, blocking_messages=blocking_messages)


class StageShape(NamedTuple):
    """The properties that a stage's cost depends on; stages of one shape cost the same."""

    device: str
    """Device type that bounds the stage: the slowest of its ranks'."""
    tp_degree: int
    """Ranks that share the stage's layers."""
    num_layers: int
    """Number of layers."""
    has_embedding: bool = False
    """Whether the embedding comes before its first layer."""
    has_head: bool = False
    """Whether final norm and head come after its last layer."""
    link: tuple[float, float] | None = None
    """(bytes/s, latency in seconds) inside the TP group; None means the device's own."""
    recomputed_layers: int = 0
    """How many of its layers recompute their activations in backward."""
    selective_layers: int = 0
    """How many of the others keep only matrix products and attention."""
    owns_on_host: bool = False
    """Whether its ranks keep what they own in their hosts' memory."""

    @property
    def layer(self) -> "StageShape":
        """One of its layers alone, its activations kept."""
        return self.inner._replace(num_layers=1)

    @property
    def inner(self) -> "StageShape":
        """Its layers without embedding and head, their activations kept."""
        return self._replace(
            has_embedding=False, has_head=False, recomputed_layers=0, selective_layers=0
        )
