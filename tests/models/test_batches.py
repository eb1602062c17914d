"""Cutting batches and joining outputs are inverse to each other."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.errors import BatchError
from lightning_hetero.models.batches import EmptyBatch, count_samples, cut_batch


def batch_of(num_samples: int) -> dict[str, Any]:
    return {
        "ids": torch.arange(num_samples * 3).view(num_samples, 3),
        "pair": (torch.arange(num_samples), [torch.arange(num_samples) + 1]),
        "texts": [f"text {index}" for index in range(num_samples)],
        "epoch": 4,
        "temperature": torch.tensor(0.5),
        "name": "train",
    }


@given(num_samples=st.integers(1, 12), num_microbatches=st.integers(1, 15))
def test_parts_hold_every_sample_once_and_are_even(num_samples: int, num_microbatches: int) -> None:
    batch = batch_of(num_samples)
    parts = cut_batch(batch, num_microbatches)
    assert len(parts) == min(num_samples, num_microbatches)
    sizes = [count_samples(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([part["ids"] for part in parts]), batch["ids"])
    assert torch.equal(torch.cat([part["pair"][0] for part in parts]), batch["pair"][0])
    assert torch.equal(torch.cat([part["pair"][1][0] for part in parts]), batch["pair"][1][0])
    assert [text for part in parts for text in part["texts"]] == batch["texts"]
    for part in parts:  # What is no sample goes to every micro-batch.
        assert (part["epoch"], part["name"], part["temperature"]) == (4, "train", 0.5)


def test_a_microbatch_changed_in_place_leaves_what_others_have_saved_usable() -> None:
    batch = torch.arange(8.0).reshape(4, 2)
    first, second = cut_batch(batch, 2)
    weight = torch.ones(2, requires_grad=True)
    loss = (first * weight).sum()
    second.mul_(2.0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 4.0]
    assert batch[2:].tolist() == [[8.0, 10.0], [12.0, 14.0]], "it is the batch's memory"


def test_lists_of_tensors_are_cut_inside_however_deep() -> None:
    ids, mask, labels = torch.arange(2), torch.arange(2) + 5, torch.arange(2) + 7
    first, second = cut_batch([[ids, mask], [labels, [ids, ["a", "b"]]]], 2)
    assert str(first) == "[[tensor([0]), tensor([5])], [tensor([7]), [tensor([0]), ['a']]]]"
    assert str(second) == "[[tensor([1]), tensor([6])], [tensor([8]), [tensor([1]), ['b']]]]"


def test_without_tensors_lists_are_counted() -> None:
    texts, classes = ["a", "b", "c"], [{"is": 1}, {"is": 2}, {"is": 1}]
    first, second = cut_batch({"texts": texts, "classes": classes, "name": "train"}, 2)
    assert first == {"texts": ["a"], "classes": [{"is": 1}], "name": "train"}
    assert second == {"texts": ["b", "c"], "classes": classes[1:], "name": "train"}
    assert cut_batch(texts, 3) == [["a"], ["b"], ["c"]]


@pytest.mark.parametrize("batch", [EmptyBatch(), torch.zeros(0, 3)])
def test_a_batch_without_samples_has_no_microbatches(batch: Any) -> None:
    assert count_samples(batch) == 0
    assert cut_batch(batch, 3) == cut_batch(torch.zeros(4, 1), 0) == []


@dataclass(frozen=True)
class Fields:
    ids: torch.Tensor
    texts: list[str]
    encoding: Any


def test_dataclasses_and_dicts_in_disguise_are_cut_inside() -> None:
    ids = torch.arange(6).view(3, 2)
    batch = Fields(ids, ["a", "b", "c"], UserDict(mask=ids + 1, epoch=4))
    assert count_samples(batch) == 3
    first, second = cut_batch(batch, 2)
    assert isinstance(second, Fields)
    assert isinstance(second.encoding, UserDict)
    assert (first.texts, second.texts) == (["a"], ["b", "c"])
    assert torch.equal(second.ids, ids[1:])
    assert torch.equal(second.encoding["mask"], ids[1:] + 1)
    assert second.encoding["epoch"] == 4
    assert torch.equal(batch.encoding["mask"], ids + 1)


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        ((torch.zeros(2, 3), torch.zeros(4)), r"\[\(2, 3\), \(4,\)\]"),
        (torch.tensor(1.0), r"\[\]"),
        ({"text": "no tensor"}, r"\[\]"),
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused_with_its_shapes(batch: Any, shapes: str) -> None:
    name = type(batch).__name__
    with pytest.raises(BatchError, match=f"type {name} can't be cut .*{shapes}.*num_samples"):
        cut_batch(batch, 2)
