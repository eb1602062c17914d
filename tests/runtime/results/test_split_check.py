"""Whether a loss may be cut, and what it is over, is measured by gradients of halves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.counts import Counting, LossReduction, LossRule
from lightning_hetero.runtime.results.split_check import (
    Evidence,
    Limits,
    Verdict,
    is_due,
    judge,
)
from tests.runtime.results import split_cases as cases
from tests.runtime.results.split_cases import ROWS, WIDTH

TOKENS = 5
NUM_ROWS = 6
LABELS, MASK = ROWS.labels, ROWS.mask
WEIGHT, TABLE = cases.WEIGHT.detach().clone(), cases.TABLE
REFUSED, NOT_RUN = "refused", "not run"


class Model(nn.Module):
    """Rows times a weight, scaled and shifted; or a residual layer and a head."""

    def __init__(self, layer: cases.Case | None = None) -> None:
        super().__init__()
        self.layer = layer
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.layer is not None:
            y = x + self.layer(y)
        return y * self.gain + self.bias


def evidence_of(
    loss_of: Callable[[nn.Module, Any], Tensor],
    model: nn.Module,
    batch: dict[str, Tensor],
    dtype: torch.dtype,
) -> Evidence:
    half = NUM_ROWS // 2
    gradients, parts = [], [slice(0, NUM_ROWS), slice(0, half), slice(half, None)]
    chosen, limits = [*model.parameters(), cases.WEIGHT], Limits.of(dtype)
    for rows in parts:
        part = {name: item[rows] for name, item in batch.items()}
        ROWS.labels, ROWS.mask = part["labels"], part["mask"]
        loss = loss_of(model, part["x"])
        limits = max(limits, Limits.of_graph(loss), key=lambda item: item.refuse)
        found = torch.autograd.grad(loss, chosen, allow_unused=True)
        pairs = zip(found, chosen, strict=True)
        flat = [torch.zeros_like(p) if g is None else g for g, p in pairs]
        gradients.append(torch.cat([item.reshape(-1).float() for item in flat]))
    ROWS.labels, ROWS.mask = LABELS, MASK
    counts = {}
    for way in Counting.likely(batch, None):
        first, second, third = (
            float(way.of({n: item[rows] for n, item in batch.items()}, None)) for rows in parts
        )
        counts[way] = (first, second, third)
    return Evidence.of(gradients, counts, num_samples=NUM_ROWS, limits=limits, is_random=False)


def verdict_of(
    loss_of: Callable[[nn.Module, Any], Tensor],
    model: nn.Module,
    *,
    dtype: torch.dtype,
    num_steps: int,
    shape: tuple[int, ...] = (WIDTH,),
) -> str:
    generator = torch.Generator().manual_seed(3)
    batch = {
        "x": torch.randn((NUM_ROWS, *shape), generator=generator).to(dtype),
        "mask": MASK,
        "labels": LABELS,
    }
    model = model.to(dtype)
    cases.WEIGHT.data, cases.TABLE = WEIGHT.to(dtype), TABLE.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(num_steps):
        optimizer.zero_grad()
        F.mse_loss(model(batch["x"]), torch.zeros_like(batch["x"])).backward()
        optimizer.step()
    before = LossRule(LossReduction.MEAN, Counting.usual(batch, None))
    try:
        found = evidence_of(loss_of, model, batch, dtype)
    except NotImplementedError:
        return NOT_RUN
    except (RuntimeError, ValueError, IndexError) as error:
        # The same on half a micro-batch ends a run; the whole one ends it anyhow.
        is_missing = "not implemented" in str(error) or "dtype" in str(error)
        return NOT_RUN if is_missing else REFUSED
    try:
        verdict = judge([found], before, None, allow_mixing=False)
    except StepError:
        return REFUSED
    if not verdict.is_verified:
        return "unverified"
    return "sum" if verdict.rule.is_sum else "mean"


RANDOM = {
    "in the order of chance",
    "in a copy of such an order",
    "in an order made by chance",
    "a table's rows",
    "columns in another order",
    "with dropout",
    "with noise",
    "drawn by trial",
    "dropout",
}
"""Draw random numbers: then gradients aren't compared."""
TABLES: list[tuple[dict[str, cases.Case], str]] = [
    (cases.MEANS, "mean"),
    (cases.SUMS, "sum"),
    (cases.SEPARATE, "mean"),
    (cases.ALONE, "mean"),
    (cases.OTHERS, "sum"),
    (cases.TOGETHER, REFUSED),
    (cases.MIXED, REFUSED),
    (cases.MEETING, REFUSED),
    (cases.BY_PLACE, REFUSED),
    (cases.WEIGHED, REFUSED),
]
OTHERWISE = {
    # Known by numbers, though no rule about code covered them.
    "what may be a mean by hand": "mean",
    "that of a loss": "mean",
    "means of what is half": "mean",
    "means of chunks": "mean",
    "a mean over a number": "mean",
    "a sum of means over samples that were turned": "mean",
    "a sum by a number": "mean",
    "a sum by a number of others": "mean",
    "a sum": "sum",
    # Use other samples, or rows by their places, in a way that only numbers show.
    "rows with columns": REFUSED,
    "one by one": REFUSED,
    "those with targets": REFUSED,
    "weights of the batch's classes": REFUSED,
    "a product": REFUSED,
    "a mean divided by a count": REFUSED,
    "a mean over an array's number": REFUSED,
    "a sum of the first": REFUSED,
    "a sum of the last, changed": REFUSED,
    "a loss of the first": REFUSED,
    "a sum of the first ones": REFUSED,
    "a sum of every second": REFUSED,
    "a sum by a number that was told of others": REFUSED,
    "a sum of what nobody knows": REFUSED,
    "a mean of what nobody knows": REFUSED,
    "what was normalised by the batch": REFUSED,
}
LOSSES = [
    (name, make, OTHERWISE.get(name, kind))
    for table, kind in TABLES
    for name, make in table.items()
    if name not in RANDOM
]
LAYERS = [
    (name, make, kind)
    for table, kind in ((cases.LAYERS_MEETING, REFUSED), (cases.LAYERS_APART, "mean"))
    for name, make in table.items()
    if name not in RANDOM
]


def of_tokens(model: nn.Module, x: Tensor) -> Tensor:
    rows = model(x).flatten(0, 1).float()
    return F.cross_entropy(rows, ROWS.labels.repeat_interleave(TOKENS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_steps", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearly_all_losses_and_layers_are_judged_right(dtype: torch.dtype, num_steps: int) -> None:
    wrong, total = {}, 0
    for name, make, expected in [*LOSSES, *LAYERS]:
        is_layer = any(make is other for _, other, _ in LAYERS)
        torch.manual_seed(1)
        told = verdict_of(
            of_tokens if is_layer else lambda model, x, make=make: make(model(x)),
            Model(make if is_layer else None),
            dtype=dtype,
            num_steps=num_steps,
            shape=(TOKENS, WIDTH) if is_layer else (WIDTH,),
        )
        if told == NOT_RUN:
            continue  # Not all functions are there in bf16.
        total += 1
        if told != expected:
            wrong[name] = told, expected
    assert total >= 135
    assert len(wrong) <= 0.02 * total, wrong


def evidence(
    gradients: list[list[float]], counts: list[tuple[float, float, float]], **options: Any
) -> Evidence:
    named = {Counting("kept", place): item for place, item in enumerate(counts)}
    found = {"num_samples": 2, "limits": Limits.of(torch.float32), "is_random": False, **options}
    return Evidence.of([torch.tensor(item) for item in gradients], named, **found)


def judged(*found: Evidence, declared: LossReduction | None = None, mixes: bool = False) -> Verdict:
    return judge(found, USUAL, declared, allow_mixing=mixes)


USUAL = LossRule(LossReduction.MEAN, Counting("kept", 0))
SUM = LossRule(LossReduction.SUM, Counting("kept", 0))
OTHER = LossRule(LossReduction.MEAN, Counting("kept", 1))


def test_all_pipelines_must_keep_a_rule() -> None:
    even = evidence([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2), (4, 2, 2)])
    uneven = evidence([[1.5, 0.5], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2), (4, 3, 1)])
    assert judged(even).rule == USUAL
    assert judged(uneven).rule == judged(even, uneven).rule == OTHER


def test_one_sample_twice_tells_sums_from_means() -> None:
    assert judged(evidence([[4.0], [2.0], [2.0]], [(2, 1, 1)])).rule == SUM
    assert judged(evidence([[2.0], [2.0], [2.0]], [(2, 1, 1)])).rule == USUAL
    with pytest.raises(StepError, match=r"best, 0\.75 and 0\.75"):
        judged(evidence([[3.0], [2.0], [2.0]], [(2, 1, 1)]))


def test_what_is_declared_must_hold_and_mixing_can_be_allowed() -> None:
    added = evidence([[2.0, 2.0], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2)])
    together = evidence([[2.0, 1.0, 3.0], [2.0, 0.0, 0.0], [0.0, 2.0, 0.0]], [(4, 2, 2)])
    assert judged(added, declared=LossReduction.SUM).rule == SUM
    with pytest.raises(StepError, match=r"isn't a mean over .*, as it is declared to be"):
        judged(added, declared=LossReduction.MEAN)
    with pytest.raises(StepError, match=r"HeteroStrategy\(allow_mixing=True\)"):
        judged(together)
    assert judged(together, mixes=True).rule in (USUAL, SUM)


def test_where_gradients_show_nothing_the_usual_rule_stays_unverified() -> None:
    zero, nan = [[0.0]] * 3, [[float("nan")], [1.0], [1.0]]
    for gradients in (zero, nan):
        verdict = judged(evidence(gradients, [(2, 1, 1)]))
        assert verdict == Verdict(USUAL, is_verified=False)
    random = judged(evidence([[3.0], [2.0], [2.0]], [(2, 1, 1)], is_random=True))
    assert random.rule == USUAL
    assert "draws random numbers even in eval mode" in random.warning


def test_a_half_without_targets_counts_nothing() -> None:
    nothing = [float("nan"), float("nan")]
    found = evidence([[1.0, 2.0], [1.0, 2.0], nothing], [(3, 3, 0), (4, 2, 2)])
    assert judged(found).rule == USUAL


def test_a_part_without_targets_is_no_sum_and_its_targets_are_counted_as_none() -> None:
    nothing = [float("nan"), float("nan")]
    half = evidence([[1.0, 2.0], [1.0, 2.0], nothing], [(4, 2, 2)])
    good = evidence([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2)])
    for found in ([half], [good, half], [good, evidence([nothing] * 3, [(4, 2, 2)])]):
        with pytest.raises(StepError, match=r"NaN .* num_target_tokens"):
            judged(*found)


def test_small_residuals_warn_between_the_limits() -> None:
    rough = evidence([[1.0, 1.0007], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2)])
    assert "put together" in judged(rough).warning
    halved = evidence(
        [[1.0, 1.01], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2)], limits=Limits.of(torch.bfloat16)
    )
    assert judged(halved).warning == ""


def test_checks_are_due_in_few_iterations() -> None:
    assert [index for index in range(2000) if is_due(index)] == [0, 1, 10, 100, 1000]


@pytest.mark.parametrize("are_alone", [True, False])
def test_two_samples_tell_a_sum_from_a_sum_of_means_over_their_groups(are_alone: bool) -> None:  # noqa: FBT001
    weight = torch.randn(WIDTH, requires_grad=True)
    rows, groups = torch.randn(2, WIDTH), torch.arange(2) if are_alone else torch.arange(2) * 0

    def evidence_of_rows(*parts: list[int]) -> Evidence:
        gradients = []
        for part in parts:
            values = (rows[part] @ weight).square()
            loss = sum(values[groups[part] == group].mean() for group in groups[part].unique())
            gradients.extend(torch.autograd.grad(loss, [weight]))
        counts = {Counting("samples"): tuple(float(len(part)) for part in parts)}
        limits = Limits.of(torch.float32)
        return Evidence.of(gradients, counts, num_samples=2, limits=limits, is_random=False)

    usual = LossRule(LossReduction.MEAN, Counting("samples"))
    pair, twice = evidence_of_rows([0, 1], [0], [1]), evidence_of_rows([0, 0], [0], [0])
    if are_alone:
        assert judge([pair], usual, None, allow_mixing=False).rule.is_sum
        with pytest.raises(StepError, match="treats samples together"):
            judge([pair, twice], usual, None, allow_mixing=False)
    else:
        assert judge([pair, twice], usual, None, allow_mixing=False).rule == usual
