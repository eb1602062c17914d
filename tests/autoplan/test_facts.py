from types import SimpleNamespace

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero.autoplan.facts import BatchSizes, find_batch_sizes
from tests.toy import CONTEXT, loader


def test_a_loader_tells_its_batch_and_its_samples_their_length() -> None:
    assert find_batch_sizes([loader(8, 4)]) == BatchSizes(samples=4, sequence_length=CONTEXT)


def test_what_is_said_goes_before_what_is_measured() -> None:
    module = SimpleNamespace(hparams=SimpleNamespace(context_length=77, batch_size=9))
    found = find_batch_sizes([loader(8, 4), module])
    assert found == BatchSizes(samples=4, sequence_length=77)


def test_a_batch_sampler_tells_its_batch() -> None:
    sampler = torch.utils.data.BatchSampler(range(12), batch_size=3, drop_last=False)
    rows = TensorDataset(torch.zeros(12, 5, dtype=torch.long))
    found = find_batch_sizes([DataLoader(rows, batch_sampler=sampler)])
    assert found == BatchSizes(samples=3, sequence_length=5)


def test_frames_of_floats_count_as_tokens() -> None:
    rows = TensorDataset(torch.zeros(4, 11, 3), torch.zeros(4))
    assert find_batch_sizes([DataLoader(rows, batch_size=2)]).sequence_length == 11


def test_nothing_known_is_none_and_a_dataset_that_raises_ends_nothing() -> None:
    class Broken:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> None:
            raise OSError("no such shard")

    nothing = BatchSizes(samples=None, sequence_length=None)
    assert find_batch_sizes([None, SimpleNamespace(dataset=Broken())]) == nothing
