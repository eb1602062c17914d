"""Small datasets of token rows of different lengths, and parts of the data side to try on them."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_hetero.assign import PipelineCost
from lightning_hetero.assign.iteration import AssignmentRequest
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.data.ahead import AheadPlanner, AssignmentStore
from lightning_hetero.data.candidates import Candidates
from lightning_hetero.data.loader import TicketDealer
from lightning_hetero.data.order import Drawn, IterationSource

VOCABULARY = 23


def lengths_of(num_rows: int, longest: int = 40, seed: int = 3) -> list[int]:
    """Return lengths with a long tail."""
    generator = np.random.default_rng(seed)
    return (
        np.minimum(1 + generator.exponential(longest / 4, num_rows), longest).astype(int).tolist()
    )


class Rows(Dataset[Any]):
    """Rows of token ids; the first token of a row is its index, so that batches can be traced."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(5)
        self.rows = [torch.randint(VOCABULARY, (n,), generator=generator) for n in lengths]
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.rows[index], "index": index}


class RowStream(IterableDataset[Any]):
    """The same rows, only from the start."""

    def __init__(self, lengths: list[int]) -> None:
        self.rows = Rows(lengths)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(len(self.rows)))


def indices(samples: list[Any]) -> list[int]:
    """Collate samples to the indices of their rows."""
    return [sample["index"] for sample in samples]


class Collects(L.LightningModule):
    """Keeps the samples that its steps get."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: list[int], batch_idx: int) -> torch.Tensor:
        self.seen.append(batch)
        return self.layer(torch.tensor([[float(len(batch))]])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def equal_costs(num_pipelines: int, **changes: Any) -> tuple[PipelineCost, ...]:
    fields = {"a": 1e-5, "b": 1e-3, "c": 0.0, "max_len": 200, "util_len": 100, "num_stages": 1}
    return (PipelineCost(**(fields | changes)),) * num_pipelines


def equal_candidates(num_ranks: int) -> Candidates:
    """Return one plan: each rank is a pipeline."""
    plan = ParallelPlan.even(world_size=num_ranks, num_layers=1)
    costs = equal_costs(num_ranks, max_len=10_000, util_len=10_000)
    return Candidates(plans=(plan,), costs=(costs,))


def request(*lengths: int, num_pipelines: int = 2) -> AssignmentRequest:
    """Return what asks for an assignment of samples of these lengths."""
    return AssignmentRequest(lengths=np.array(lengths), candidates=(equal_costs(num_pipelines),))


def dealers(
    source: IterationSource,
    candidates: Candidates,
    num_ranks: int,
    store: AssignmentStore | None = None,
) -> list[TicketDealer]:
    """Return the dealers of ranks that share a store and plan for themselves."""
    store = store or AssignmentStore()
    return [
        TicketDealer(
            source,
            AheadPlanner(store, global_rank=rank, world_size=num_ranks),
            candidates,
            global_rank=rank,
        )
        for rank in range(num_ranks)
    ]


def samples_of(drawn: list[Drawn]) -> list[Any]:
    return [sample for item in drawn for sample in item.samples]
