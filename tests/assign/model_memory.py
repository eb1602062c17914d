"""Memory of a transformer by the formulas of Hydraulis's Appendix B.1, for published numbers."""

from collections.abc import Sequence
from dataclasses import dataclass

_MULTIPLE = 128


@dataclass(frozen=True, kw_only=True)
class LinearMemory:
    """Memory of one rank of a stage, linear in the length of a micro-batch."""

    capacity_bytes: float
    """Memory of the device less a safety margin."""
    state_bytes: float
    """Weights, gradients, optimizer states, embedding: whatever no token adds to."""
    bytes_per_token: float
    """Activations of one micro-batch per token, above 0."""
    num_in_flight: int
    """Micro-batches whose activations the stage holds at once: PP - stage_index under 1F1B."""

    @property
    def max_len(self) -> float:
        """Tokens of a micro-batch with which the stage is full; negative if it is already."""
        per_token = self.bytes_per_token * self.num_in_flight
        return (self.capacity_bytes - self.state_bytes) / per_token


def max_len(stages: Sequence[LinearMemory]) -> int:
    """Return the most tokens that every stage can hold, a multiple of 128; 0 if none."""
    least = min(stage.max_len for stage in stages)
    return max(0, int(least) // _MULTIPLE * _MULTIPLE)


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
    ) -> LinearMemory:
        """Return what a rank of the first of equal stages holds; capacity is without the margin."""
        sharded = self.sharded_share / num_devices
        kept = (1 - self.sharded_share) / tp_degree
        layers = self.num_layers * self.hidden_size**2 * self.layer_bytes
        embedding = 16 * self.hidden_size * self.vocab_size
        per_layer = self.hidden_size / tp_degree * self.activation_bytes
        return LinearMemory(
            capacity_bytes=capacity_bytes,
            state_bytes=layers * (sharded + kept / num_stages) + embedding * (sharded + kept),
            bytes_per_token=per_layer * self.num_layers / num_stages,
            num_in_flight=num_stages,
        )
