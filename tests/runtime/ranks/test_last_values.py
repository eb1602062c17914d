"""All ranks that are left act on the same values, or none does."""

import json
from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor

from lightning_hetero.runtime.ranks.last_values import LastValues


class Paper:
    """A board that holds what was laid open, and what other ranks did."""

    def __init__(self, others: Iterable[tuple[int, str]] = ()) -> None:
        self.shown: list[tuple[int, str]] = []
        self.others = list(others)

    def lay_open(self, number: int, values: str) -> None:
        self.shown.append((number, values))

    def await_others(self) -> Iterable[tuple[int, str]]:
        assert self.shown, "others would wait for this rank, which waits for them"
        return self.others


def numbered(number: int) -> Tensor:
    return torch.tensor([[number / 3, float("nan")]], dtype=torch.float64)


def broken() -> Tensor:
    raise RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1234")


def test_a_rank_takes_what_another_one_has() -> None:
    paper = Paper([(2, json.dumps(numbered(2).tolist())), (1, json.dumps(numbered(1).tolist()))])
    values = LastValues(paper)
    first = values.take(lambda: numbered(1))
    found = values.take(broken)
    torch.testing.assert_close(found, numbered(2), rtol=0, atol=0, equal_nan=True)
    first.zero_()  # What it showed is a copy.
    values.lay_open()
    assert paper.shown == [(1, json.dumps(numbered(1).tolist()))]


def test_if_nobody_has_the_values_the_loss_is_raised() -> None:
    values = LastValues(Paper([(1, "[]"), (0, "[]")]))
    values.take(lambda: numbered(1))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        values.take(broken)


def test_what_comes_after_values_were_laid_open_counts_only_if_others_have_it() -> None:
    """Or a rank would step with values of which the others have been told that nobody has them."""
    for others in ([], [(1, json.dumps([7.0]))]):
        values = LastValues(Paper(others))
        values.lay_open()
        if others:
            assert values.take(lambda: numbered(1)).tolist() == [7.0]
        else:
            with pytest.raises(RuntimeError, match="another rank was lost"):
                values.take(lambda: numbered(1))


def test_an_error_of_its_own_is_raised_at_once() -> None:
    paper = Paper([(1, "[1.0]")])
    with pytest.raises(RuntimeError, match="its own"):
        LastValues(paper).take(lambda: (_ for _ in ()).throw(RuntimeError("its own")))
    assert not paper.shown


def test_all_that_are_left_step_or_none_in_every_order_of_arrival_and_loss() -> None:
    """Three ranks are left. Each gets values before it hears of the loss, after it, or never."""
    for cases in product(["before", "after", "never"], repeat=3):
        papers = [Paper() for _ in cases]
        values = [LastValues(paper) for paper in papers]
        for rank, case in enumerate(cases):
            if case == "before":
                values[rank].take(lambda: numbered(1))
            values[rank].close()
            values[rank].lay_open()
        for paper in papers:
            paper.others = [item for other in papers if other is not paper for item in other.shown]
        have = [case == "before" for case in cases]
        for rank, case in enumerate(cases):
            if case != "before":
                try:
                    values[rank].take((lambda: numbered(1)) if case == "after" else broken)
                    have[rank] = True
                except RuntimeError:
                    pass
        assert len(set(have)) == 1, cases
