"""Callbacks for Lightning's Trainer: checkpoints in slices, and restarts on other machines."""

from lightning_hetero.callbacks.elastic import ElasticRestart
from lightning_hetero.callbacks.layerwise import LayerwiseCheckpoint

__all__ = ["ElasticRestart", "LayerwiseCheckpoint"]
