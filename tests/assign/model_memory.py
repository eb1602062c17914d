"""Memory of a transformer by the formulas of Hydraulis's Appendix B.1, for published numbers."""

from dataclasses import dataclass

from lightning_hetero.planner.proposing.pipeline_costs import StageMemory

__all__ = ["ModelMemory"]


@dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """Memory coefficients of a transformer (B.1).

    On the first of PP stages, with N devices: activations `L·(l·H/TP)·A`, layers
    `L·H²·B·(α/N + (1-α)/(PP·TP))`, embedding `16·H·V·(α/N + (1-α)/TP)`.
    """

    hidden_size: int
    """H."""
    num_layers: int
    """L."""
    vocab_size: int
    """V."""
    activation_bytes: float
    """A: bytes of activations per layer, token and hidden unit."""
    layer_bytes: float
    """B: bytes of model states per layer and squared hidden size."""
    sharded_share: float = 0.75
    """α: the share of model states spread over all devices; 3/4 for fp32 states, 16-bit weights."""

    def first_stage(
        self, *, tp_degree: int, num_stages: int, num_devices: int, capacity_bytes: float
    ) -> StageMemory:
        """Return what a rank of the first of equal stages holds; capacity is without the margin."""
        sharded = self.sharded_share / num_devices
        kept = (1 - self.sharded_share) / tp_degree
        layers = self.num_layers * self.hidden_size**2 * self.layer_bytes
        embedding = 16 * self.hidden_size * self.vocab_size
        per_layer = self.hidden_size / tp_degree * self.activation_bytes
        return StageMemory(
            capacity_bytes=capacity_bytes,
            state_bytes=layers * (sharded + kept / num_stages) + embedding * (sharded + kept),
            bytes_per_token=per_layer * self.num_layers / num_stages,
            num_in_flight=num_stages,
        )
