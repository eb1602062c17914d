"""What steps return and append is what one device has, on every rank."""

from collections import UserDict, defaultdict
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from lightning_hetero.runtime.results.outputs import StepRecord, join_outputs
from tests.fits import attempt, check, each
from tests.plans import COPIES, STAGES
from tests.processes import ProcessPool
from tests.toy import TinyModule


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
    "a model's output": lambda x: CausalLMOutput(logits=x, loss=x.mean()),
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


class Collecting(TinyModule):
    """Collects for the end of an epoch what steps and hooks of batches see."""

    validates = True

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []
        self.by_kind: dict[str, list[Any]] = defaultdict(list)
        self.losses_of_steps: list[Tensor] = []
        self.hooked: list[Any] = []
        self.nested: list[list[Tensor]] = [[]]
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
        self.nested[0].append(ids[:, 1])
        return {"loss": loss, "pred": logits.argmax(-1)}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.hooked.append(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("mean_logit", torch.cat([item["logits"] for item in self.outputs]).mean())
        self.log("mean_loss", torch.stack([item["loss"] for item in self.outputs]).mean())
        self.log("rows", torch.cat(self.nested[0]).float().mean())
        self.nested[0].clear()
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
    check(pool, *each([Collecting, ReturnsMapping], STAGES, COPIES))


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
    cases = each([Returning], STAGES, options={"share_outputs": False})
    assert [found.seen for (found,) in pool.run(attempt, 2, *cases)] == [[None] * 4, [4] * 4]
