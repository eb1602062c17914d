"""Ranks that read different data are refused by name before a pass's first step."""

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from math import ceil
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    random_split,
)

from lightning_hetero.data.orders import peek
from tests.fits import attempt, each
from tests.plans import CHAIN, TRIPLE, Plan
from tests.processes import ProcessPool
from tests.toy import Rows, TinyModule


class Shuffles(Sampler[int]):
    """Shuffles with numbers of its own."""

    def __init__(self, seed: int | None) -> None:
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(int.from_bytes(os.urandom(4)) if self._seed is None else self._seed)
        return iter(torch.randperm(16, generator=generator).tolist())

    def __len__(self) -> int:
        return 16


class Stream(IterableDataset[Any]):
    def __init__(self, length: int) -> None:
        self._rows = Rows(length)

    def __iter__(self) -> Iterator[Any]:
        return iter([self._rows[index] for index in range(len(self._rows))])

    def __len__(self) -> int:
        return len(self._rows)


def split(seed: int) -> Any:
    return random_split(Rows(32), [16, 16], generator=torch.Generator().manual_seed(seed))[0]


def own_generator(rank: int) -> Any:
    return RandomSampler(range(16), generator=torch.Generator().manual_seed(rank))


LOADERS: dict[str, Callable[[int], Any]] = {
    "shorter": lambda rank: DataLoader(Rows(16 - 4 * rank), 2),
    "shorter stream": lambda rank: DataLoader(Stream(16 - 4 * rank), 2),
    "unseeded": lambda rank: DataLoader(Rows(16), 2, sampler=Shuffles(None)),
    "own generators": lambda rank: DataLoader(Rows(16), 2, sampler=own_generator(rank)),
    "unseeded split": lambda rank: DataLoader(split(rank), 2, shuffle=True),
    "alike": lambda rank: DataLoader(split(5), 2, sampler=Shuffles(7)),
}


class Validated(TinyModule):
    """Reads a loader that differs on rank 2 to train, or to validate."""

    def __init__(self, name: str, *, validates: bool) -> None:
        super().__init__()
        self.validates = validates
        own = LOADERS[name](max(0, int(os.environ["RANK"]) - 1))
        usual = DataLoader(Rows(8), batch_size=2)
        given = iter([usual, own] if validates else [own, usual])
        self.loader = lambda *_, **__: next(given)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])


def fit_all(rank: int, plan: Plan) -> dict[str, Any]:
    """Train on each loader; return what became of it."""
    makes = {name: partial(Validated, name, validates=False) for name in LOADERS}
    makes["validation"] = partial(Validated, "unseeded", validates=True)
    cases = each(makes.values(), plan, num_microbatches=1)
    return dict(zip(makes, attempt(rank, *cases), strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("plan", [CHAIN, TRIPLE], ids=["stages", "copies"])
def test_ranks_that_read_different_data_are_refused(pool: ProcessPool, plan: Plan) -> None:
    for found in pool.run(fit_all, 3, plan):
        assert len(found.pop("alike").losses) == 2 * ceil(8 / len(plan["pipelines"]))
        assert "from the loader of this evaluation" in found.pop("validation")
        for name, message in found.items():
            assert "from the training loader" in str(message), name
            known = "" if "stream" in name else "16 samples in order "
            other = "6 batches of" if "shorter" in name else "8 batches of 16"
            # Of three ranks the last one differs; where nobody seeds, each does.
            odd = 1 if name == "unseeded" else 2
            told = f"rank 0 has 8 batches of {known}.*, rank {odd} has {other}"
            assert re.search(told, message), name


def test_a_look_at_an_order_takes_nothing_of_it_however_long_it_is() -> None:
    batches = [[index, index + 1] for index in range(0, 9000, 2)]
    digest, again = peek(iter(batches), None)
    assert list(again) == batches
    data = range(9)
    subsets = [Subset(data, [1, 2]), Subset(data, [2, 1]), Subset(Subset(data, [2, 1]), [0, 1])]
    assert len({digest, *(peek(iter(batches), subset)[0] for subset in subsets)}) == 4
