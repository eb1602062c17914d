"""Ranks that read different data are refused by name before a pass's first step."""

import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    random_split,
)

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.data.orders import Order, check_alike, peek
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.toy import Rows, TinyModule, quiet

STAGES = plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 3)))
COPIES = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 3)))


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


def fit(rank: int, plan: dict[str, Any], name: str, validates: bool) -> Any:  # noqa: FBT001
    L.seed_everything(3 + rank, verbose=False)
    module = TinyModule()
    module.validation_step = lambda batch, _: module.model(batch[0]).sum()  # type: ignore[method-assign,assignment]
    strategy = HeteroStrategy(ParallelPlan.from_dict(plan), num_microbatches=1)
    trainer = L.Trainer(**quiet(max_epochs=2, num_sanity_val_steps=0), strategy=strategy, devices=2)
    loaders = [DataLoader(Rows(8), batch_size=2), LOADERS[name](rank)]
    try:
        trainer.fit(module, *(loaders if validates else loaders[1:]))
    except ConfigurationError as error:
        return str(error)
    return len(module.losses)


def fit_all(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    """Train on each loader; return what became of it."""
    found = {name: fit(rank, plan, name, False) for name in LOADERS}
    return found | {"validation": fit(rank, plan, "unseeded", True)}


@pytest.mark.dist
@pytest.mark.parametrize("plan", [STAGES, COPIES], ids=["stages", "copies"])
def test_ranks_that_read_different_data_are_refused(
    pool: ProcessPool, plan: dict[str, Any]
) -> None:
    for found in pool.run(fit_all, 2, plan):
        assert found.pop("alike") == 2 * 8 // len(plan["pipelines"])
        assert "from the loader of this evaluation" in found.pop("validation")
        for name, message in found.items():
            assert "from the training loader" in str(message), name
            known = "" if "stream" in name else "16 samples in order "
            other = "6 batches of" if "shorter" in name else "8 batches of 16"
            told = f"rank 0 has 8 batches of {known}.*, rank 1 has {other}"
            assert re.search(told, message), name


def test_a_look_at_an_order_takes_nothing_of_it() -> None:
    batches = [[index, index + 1] for index in range(0, 9000, 2)]
    digest, again = peek(iter(batches), None)
    assert list(again) == batches
    assert peek(iter(batches), None)[0] == digest
    assert peek(iter(batches[1:]), None)[0] != digest
    assert peek(iter(batches[:1] * 3), None)[0] != peek(iter(batches[:1]), None)[0]
    data = TensorDataset(torch.zeros(9))
    subsets = [Subset(data, [1, 2]), Subset(data, [2, 1]), Subset(Subset(data, [2, 1]), [0, 1])]
    assert len({peek(iter([[0, 1]]), subset)[0] for subset in subsets}) == 3


def test_the_rank_that_differs_is_named() -> None:
    one, other = (Order("training loader", None, 5, digest) for digest in (1, 2))
    check_alike([[one], [one]])
    with pytest.raises(ConfigurationError, match=r"rank 2 has an unknown .* order 00000002"):
        check_alike([[one], [one], [other]])
