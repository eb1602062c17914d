"""Batches and how they reach the ranks.

Read in this order: `order` (which samples an iteration takes), `candidates` (the plans it may run
under), `ahead` (who assigns them, ahead of time), `loader` (what a rank gets of them) and `module`
(what a Trainer iterates). `dealer` and `dealing` are for ordinary data loaders.
"""

from lightning_hetero.data.ahead import AheadOptions, AssignmentStore
from lightning_hetero.data.candidates import Candidates
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.data.order import Cursor, EpochOrder
from lightning_hetero.data.sampler import TwoStageBatchSampler
from lightning_hetero.data.samples import OnOverlong

__all__ = [
    "AheadOptions",
    "AssignmentStore",
    "Candidates",
    "Cursor",
    "EpochOrder",
    "HeteroDataModule",
    "OnOverlong",
    "TwoStageBatchSampler",
]
