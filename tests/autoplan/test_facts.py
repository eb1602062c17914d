from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.autoplan.facts import BatchSizes, find_batch_sizes
from tests.toy import CONTEXT, loader


class Broken:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        raise OSError("no such shard")


SAID = SimpleNamespace(hparams=SimpleNamespace(context_length=77, batch_size=9))
THREES = torch.utils.data.BatchSampler(range(12), batch_size=3, drop_last=False)
ROWS = TensorDataset(torch.zeros(12, 5, dtype=torch.long))
FRAMES = TensorDataset(torch.zeros(4, 11, 3), torch.zeros(4))


@pytest.mark.parametrize(
    ("sources", "samples", "sequence_length"),
    [
        ([loader(8, 4)], 4, CONTEXT),
        ([loader(8, 4), SAID], 4, 77),  # What is said goes before what is measured.
        ([DataLoader(ROWS, batch_sampler=THREES)], 3, 5),
        ([DataLoader(FRAMES, batch_size=2)], 2, 11),  # Frames of floats count as tokens.
        ([None, SimpleNamespace(dataset=Broken())], None, None),
    ],
)
def test_sizes_of_batches_are_found_or_unknown(
    sources: list[Any], samples: int | None, sequence_length: int | None
) -> None:
    found = BatchSizes(samples=samples, sequence_length=sequence_length)
    assert find_batch_sizes(sources) == found
