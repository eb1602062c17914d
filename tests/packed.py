"""The reference model on packed samples of random tokens, for tests and benchmarks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_hetero.models import (
    HeteroLM,
    LMConfig,
    PackedBatch,
    pack_samples,
    packed_cross_entropy,
)
from tests.toy import Compared


class Samples(Dataset[Tensor]):
    """Random tokens of given lengths."""

    def __init__(self, lengths: Sequence[int], vocabulary: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = [torch.randint(vocabulary, (n,), generator=generator) for n in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def packed(self, batch_size: int) -> DataLoader[Any]:
        """Return a loader of packed batches of so many samples."""
        return DataLoader(self, batch_size=batch_size, collate_fn=pack_samples)


class PackedLM(Compared):
    """The reference model."""

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.model = HeteroLM(config)

    def loss(self, batch: PackedBatch) -> Tensor:
        logits = self.model(batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen)
        return packed_cross_entropy(logits, batch.labels)

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)
