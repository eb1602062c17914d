"""The adapter to Lightning: `HeteroStrategy`, and what its hooks need. No algorithm lives here."""

from lightning_hetero.strategy.hetero import HeteroStrategy

__all__ = ["HeteroStrategy"]
