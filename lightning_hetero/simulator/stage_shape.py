"""The properties of a stage that its seconds and bytes depend on."""

from typing import NamedTuple

__all__ = ["StageShape"]


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
    """How many of its layers compute their activations again in backward."""
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
