"""What steps return and append is what one device has, on every rank."""

from collections import UserDict, defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_hetero.models.batches import cut_batch
from lightning_hetero.runtime.results.outputs import AppendedLists, StepRecord, join_outputs
from tests.processes import ProcessPool
from tests.runtime.step_cases import COPIES, STAGES, TinyModule, check, fit_each


class Pair(NamedTuple):
    first: Any
    second: Any


ROWS = torch.arange(12.0).reshape(6, 2)


def joined(step: Any, *cuts: int) -> Any:
    """What comes of a step on rows that are cut there."""
    records, ends = [], [0, *cuts, len(ROWS)]
    for start, stop in pairwise(ends):
        records.append(StepRecord(step(ROWS[start:stop]), {}, stop - start))
    return join_outputs(records)


@given(num_samples=st.integers(2, 12), num_microbatches=st.integers(2, 5))
@settings(deadline=None)
def test_joining_undoes_cutting(num_samples: int, num_microbatches: int) -> None:
    batch = {"a": torch.arange(num_samples), "b": (torch.rand(num_samples, 2),)}
    parts = cut_batch(batch, num_microbatches)
    found = join_outputs([StepRecord(part, {}) for part in parts])
    assert torch.equal(found["a"], batch["a"])
    assert torch.equal(found["b"][0], batch["b"][0])


STEPS: dict[str, Any] = {
    "rows": lambda x: x * 2,
    "tokens": lambda x: x.reshape(-1),
    "a choice of rows": lambda x: x[x[:, 0] > 3],
    "mean": lambda x: x.mean(),
    "mean as a number": lambda x: {"mean": x.mean().item()},
    "constants": lambda _: {"batch_idx": 17, "name": "x"},
    "nothing": lambda _: None,
    "arrays": lambda x: x.numpy(),
    "texts": lambda x: [f"{float(row[0])}" for row in x],
    "named": lambda x: Pair(x, x.mean()),
    "dict of a kind": lambda x: defaultdict(list, a=x),
}


@pytest.mark.parametrize("name", STEPS)
def test_outputs_are_those_of_the_whole_batch(name: str) -> None:
    expected = joined(STEPS[name])
    found = joined(STEPS[name], 1, 4)
    assert type(found) is type(expected)
    if name in ("texts", "constants"):
        assert found == expected
    else:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "step",
    [
        lambda x: x.new_zeros(2, len(x)),
        lambda x: x.mean() if x[0, 0] else 1.0,
        lambda x: {"a": 1} if x[0, 0] else {"b": 1},
        lambda x: f"{len(x)}",
    ],
)
def test_what_cannot_be_joined_is_a_list_of_all_values(step: Any) -> None:
    found = joined(step, 1, 4)
    assert isinstance(found, list)
    assert len(found) == 3


class Collector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items: list[Any] = [0]
        self.buckets: list[Any] = [[1], None]
        self.by_name: dict[str, Any] = {"known": [], "count": 1}


APPENDS: dict[tuple[Any, ...], Callable[[Any], Any]] = {
    ("items",): lambda module: module.items.append(2),
    ("buckets", 0): lambda module: module.buckets[0].append(2),
    ("by_name", "known"): lambda module: module.by_name["known"].append(2),
    ("by_name", "new"): lambda module: module.by_name.update(new=[2]),
    ("new",): lambda module: setattr(module, "new", [2]),
}


@pytest.mark.parametrize("path", APPENDS)
def test_items_are_found_wherever_a_step_appends_them(path: tuple[Any, ...]) -> None:
    module = Collector()
    lists = AppendedLists(module)
    lists.begin()
    assert lists.take() == {}
    lists.begin()
    APPENDS[path](module)
    assert lists.take() == {path: [2]}
    lists.begin()
    assert lists.take() == {}


def test_a_model_output_stays_one() -> None:
    known = pytest.importorskip("transformers.modeling_outputs")
    found = joined(lambda x: known.CausalLMOutput(logits=x, loss=x.mean()), 2)
    assert isinstance(found, known.CausalLMOutput)
    assert torch.equal(found.logits, ROWS)
    assert float(found.loss) == 5.5


class Collecting(TinyModule):
    """Collects for the end of an epoch what steps and hooks of batches see."""

    validates = True

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.by_kind: dict[str, list[Any]] = defaultdict(list)
        self.losses_of_steps: list[Tensor] = []
        self.hooked: list[Any] = []
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.model(batch[0])
        loss = self.loss(logits, batch[1])
        self.losses_of_steps.append(loss.detach())
        return {"loss": loss, "pred": logits.argmax(-1)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.append(outputs["pred"].tolist())

    def on_train_epoch_end(self) -> None:
        self.seen.append([float(item) for item in self.losses_of_steps])

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        logits = self.model(ids)
        loss = self.loss(logits, labels)
        self.outputs.append({"logits": logits, "loss": loss})
        self.by_kind["first"].append(ids[:, 0])
        return {"loss": loss, "pred": logits.argmax(-1)}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooked.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("mean_logit", torch.cat([item["logits"] for item in self.outputs]).mean())
        self.log("mean_loss", torch.stack([item["loss"] for item in self.outputs]).mean())
        self.log("first", torch.cat(self.by_kind["first"]).float().mean())
        self.log("hooked_loss", torch.stack([item["loss"] for item in self.hooked]).mean())
        self.log("predicted", torch.cat([item["pred"] for item in self.hooked]).float().mean())
        self.outputs.clear()
        self.hooked.clear()


class ReturnsMapping(Collecting):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return UserDict(super().training_step(batch, batch_idx))


@pytest.mark.dist
def test_outputs_and_collected_lists_are_those_of_one_device(pool: ProcessPool) -> None:
    check(pool, [Collecting, ReturnsMapping], STAGES, COPIES, rtol=1e-5)


class Returning(TinyModule):
    validates = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch[0]).argmax(-1)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(None if outputs is None else len(outputs))


@pytest.mark.dist
def test_outputs_stay_on_last_stages_where_the_user_spares_the_traffic(pool: ProcessPool) -> None:
    results = pool.run(fit_each, 2, [Returning], STAGES, {"options": {"share_outputs": False}})
    assert [found["seen"] for (found,) in results] == [[None] * 4, [4] * 4]
