"""Draw each iteration's samples, assign them to pipelines, and load every rank's batches.

Read in this order: `order` (which samples an iteration takes), `candidates` (the plans it may run
under), `ahead` (assigning samples ahead of time), `loader` (the batches of one rank) and `module`
(the data module for a Trainer). `dealer` and `dealing` are for ordinary data loaders.
"""

from lightning_hetero.data.candidates import Candidates
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.data.order import Cursor, EpochOrder

__all__ = [
    "Candidates",
    "Cursor",
    "EpochOrder",
    "HeteroDataModule",
]
