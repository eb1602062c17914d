"""Numbers that functions make of means and sums are made once, of those of the batch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.log_entries import LogEntry, check_names
from lightning_hetero.runtime.results.numbers.kinds import Reduction, join_values
from lightning_hetero.runtime.results.targets import LossWatch

_Numbers = Callable[[Tensor, Tensor], Any]
_CASES: dict[str, _Numbers] = {
    "perplexity": lambda loss, _: torch.exp(loss),
    "by Python": lambda loss, _: math.exp(loss.item()),
    "of a float": lambda loss, _: loss.detach().float().exp().item(),
    "power": lambda loss, _: 2**loss,
    "limited": lambda loss, _: loss.clamp(max=2.0).exp(),
    "in decibel": lambda loss, _: -10 * torch.log10(loss),
    "root": lambda loss, _: torch.sqrt(loss + 1e-8),
    "complement": lambda loss, _: 1 - torch.exp(-loss),
    "harmonic": lambda loss, other: 2 * loss * other / (loss + other + 1e-8),
    "product": lambda loss, other: loss * other,
}


CHOSEN = torch.ones(4)


def _watched(number: _Numbers, rows: Tensor) -> tuple[Any, LossWatch]:
    watch = LossWatch((), len(rows))
    watch.resume()
    made = number(rows.square().mean(), rows.abs().sum() / (rows > 0).sum())
    watch.end()
    return made, watch


@pytest.mark.parametrize("name", _CASES)
def test_a_function_of_joined_parts_is_that_of_the_batch(name: str) -> None:
    batch = torch.randn(9, 4, generator=torch.Generator().manual_seed(1))
    expected, _ = _watched(_CASES[name], batch)
    found = []
    for rows in batch.split([3, 6]):
        number, watch = _watched(_CASES[name], rows)
        made = watch.reductions.formulas.of(number)
        assert made is not None
        known: list[Reduction] = [watch.reductions.of(part) for part in made.parts]  # type: ignore[misc]
        found.append((made, known))
    assert found[0][0].formula == found[1][0].formula
    joined = [
        join_values(
            known[0].kind,
            torch.tensor([float(found[i][0].parts[place]) for i in (0, 1)]),
            torch.tensor([float(item.count) for item in known]),
        )
        for place in range(found[0][0].formula.num_parts)
        if (known := [found[i][1][place] for i in (0, 1)])
    ]
    number = found[0][0].formula.compute(joined)
    torch.testing.assert_close(float(number), float(expected), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "number",
    [
        lambda loss, total: total * 3,
        lambda loss, total: loss * 3,
        lambda loss, total: total * 0.5,
        lambda loss, total: total / torch.tensor(3.0),
        lambda loss, total: total / len(CHOSEN),
        lambda loss, total: total / int(CHOSEN.sum()),
    ],
)
def test_what_may_be_a_number_of_this_microbatchs_samples_is_no_constant(number: _Numbers) -> None:
    watch = LossWatch((), 3)
    watch.resume()
    rows = torch.ones(3, 4)
    made = number(rows.mean(), rows.sum())
    watch.end()
    assert watch.reductions.formulas.of(made) is None


def test_a_part_that_has_changed_since_makes_nothing() -> None:
    def number(loss: Tensor, _: Tensor) -> Tensor:
        made = loss.exp()
        loss.mul_(0.5)
        return made

    made, watch = _watched(number, torch.ones(3, 4))
    assert watch.reductions.formulas.of(made) is None


def test_one_name_stands_for_one_formula() -> None:
    (made, watch), (other, second) = (
        _watched(_CASES[name], torch.ones(3, 4)) for name in ("perplexity", "root")
    )
    formulas = [watch.reductions.formulas.of(made), second.reductions.formulas.of(other)]
    with pytest.raises(StepError, match="computed from means and sums over samples in one way"):
        check_names([LogEntry("x", (), formula=item and item.formula) for item in formulas])
