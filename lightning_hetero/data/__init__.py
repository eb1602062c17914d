"""Draw each iteration's samples, assign them to pipelines, and load every rank's batches.

Read in this order: `order` (which samples an iteration takes), `candidates` (the plans it may run
under), `ahead` (assigning samples ahead of time), `loader` (the batches of one rank), `module`
(the data module for a Trainer) and `sampler` (for other strategies' loaders). `streams` are
datasets without a length; `dealer` and `dealing` are for ordinary data loaders.
"""

from lightning_hetero.data.candidates import Candidates
from lightning_hetero.data.module import HeteroDataModule
from lightning_hetero.data.order import Cursor, EpochOrder
from lightning_hetero.data.sampler import TwoStageBatchSampler
from lightning_hetero.data.samples import OnOverlong

__all__ = [
    "Candidates",
    "Cursor",
    "EpochOrder",
    "HeteroDataModule",
    "OnOverlong",
    "TwoStageBatchSampler",
]
