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
) -> tuple[Evidence, Limits]:
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
    return Evidence.of(gradients, counts), limits


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
        found, limits = evidence_of(loss_of, model, batch, dtype)
    except NotImplementedError:
        return NOT_RUN
    except (RuntimeError, ValueError, IndexError) as error:
        # The same on half a micro-batch ends a run; the whole one ends it anyhow.
        is_missing = "not implemented" in str(error) or "dtype" in str(error)
        return NOT_RUN if is_missing else REFUSED
    try:
        verdict = judge([found], before, None, limits=limits)
    except StepError:
        return REFUSED
    if not verdict.is_verified:
        return "unverified"
    return "sum" if verdict.rule.is_sum else "mean"


LOSSES: list[tuple[dict[str, cases.Case], str]] = [
    (cases.MEANS, "mean"),
    (cases.SUMS, "sum"),
    (cases.MEETING, REFUSED),
]
LAYERS = [(cases.LAYERS_MEETING, REFUSED), (cases.LAYERS_APART, "mean")]
ALL = [
    (name, make, kind, tables is LAYERS)
    for tables in (LOSSES, LAYERS)
    for table, kind in tables
    for name, make in table.items()
]


def of_tokens(model: nn.Module, x: Tensor) -> Tensor:
    rows = model(x).flatten(0, 1).float()
    return F.cross_entropy(rows, ROWS.labels.repeat_interleave(TOKENS))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_steps", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearly_all_losses_and_layers_are_judged_right(dtype: torch.dtype, num_steps: int) -> None:
    wrong, total = {}, 0
    for name, make, expected, is_layer in ALL:
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
    assert total >= 0.95 * len(ALL)
    assert len(wrong) <= 0.02 * total, wrong


def evidence(gradients: list[list[float]], counts: list[tuple[float, float, float]]) -> Evidence:
    named = {Counting("kept", place): item for place, item in enumerate(counts)}
    return Evidence.of([torch.tensor(item) for item in gradients], named)


FINE = Limits.of(torch.float32)


def judged(*found: Evidence, declared: LossReduction | None = None, **options: Any) -> Verdict:
    return judge(found, USUAL, declared, **{"limits": FINE, **options})


USUAL = LossRule(LossReduction.MEAN, Counting("kept", 0))
SUM = LossRule(LossReduction.SUM, Counting("kept", 0))
OTHER = LossRule(LossReduction.MEAN, Counting("kept", 1))


NOTHING = [float("nan"), float("nan")]
EVEN = evidence([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2), (4, 2, 2)])
GOOD = evidence([[1.0, 1.0], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2)])
UNEVEN = evidence([[1.5, 0.5], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2), (4, 3, 1)])
ADDED = evidence([[2.0, 2.0], [2.0, 0.0], [0.0, 2.0]], [(4, 2, 2)])
MEETING = evidence([[2.0, 1.0, 3.0], [2.0, 0.0, 0.0], [0.0, 2.0, 0.0]], [(4, 2, 2)])
HALF_EMPTY = evidence([[1.0, 2.0], [1.0, 2.0], NOTHING], [(4, 2, 2)])


def twice(whole: float) -> Evidence:
    """What one sample twice shows, whose own gradient is 2."""
    return evidence([[whole], [2.0], [2.0]], [(2, 1, 1)])


@pytest.mark.parametrize(
    ("found", "options", "rule"),
    [
        ([EVEN], {}, USUAL),
        ([UNEVEN], {}, OTHER),
        ([EVEN, UNEVEN], {}, OTHER),  # All pipelines must keep it.
        ([twice(4.0)], {}, SUM),
        ([twice(2.0)], {}, USUAL),
        ([ADDED], {"declared": LossReduction.SUM}, SUM),
        ([evidence([[1.0, 2.0], [1.0, 2.0], NOTHING], [(3, 3, 0), (4, 2, 2)])], {}, USUAL),
    ],
)
def test_the_rule_that_fits_is_found(found: Any, options: Any, rule: LossRule) -> None:
    assert judged(*found, **options).rule == rule


@pytest.mark.parametrize(
    ("found", "options", "told"),
    [
        ([twice(3.0)], {}, r"best, 0\.75 and 0\.75"),
        ([ADDED], {"declared": LossReduction.MEAN}, "isn't a mean over .*, as it is declared"),
        ([MEETING], {}, r"HeteroStrategy\(allow_mixing=True\)"),
        # A part without targets is no sum, and its targets are counted as none.
        ([HALF_EMPTY], {}, r"NaN .* num_target_tokens"),
        ([GOOD, HALF_EMPTY], {}, r"NaN .* num_target_tokens"),
        ([GOOD, evidence([NOTHING] * 3, [(4, 2, 2)])], {}, r"NaN .* num_target_tokens"),
    ],
)
def test_what_no_rule_explains_is_refused(found: Any, options: Any, told: str) -> None:
    with pytest.raises(StepError, match=told):
        judged(*found, **options)


def test_what_is_not_sure_is_said() -> None:
    assert judged(MEETING, allow_mixing=True).rule in (USUAL, SUM)
    for gradients in ([[0.0]] * 3, [[float("nan")], [1.0], [1.0]]):
        verdict = judged(evidence(gradients, [(2, 1, 1)]))
        assert verdict == Verdict(USUAL, is_verified=False)
    random = judged(twice(3.0), is_random=True)
    assert random.rule == USUAL
    assert "draws random numbers even in eval mode" in random.warning
    rough = [[1.0, 1.0007], [2.0, 0.0], [0.0, 2.0]]
    assert "put together" in judged(evidence(rough, [(4, 2, 2)])).warning
    halved = evidence(rough, [(4, 2, 2)])
    assert judged(halved, limits=Limits.of(torch.bfloat16)).warning == ""
    due = [index for index in range(20_000) if is_due(index)]
    assert due == [0, 1, 10, 100, 1_000, 10_000]


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
        return Evidence.of(gradients, counts)

    usual = LossRule(LossReduction.MEAN, Counting("samples"))
    pair, twice = evidence_of_rows([0, 1], [0], [1]), evidence_of_rows([0, 0], [0], [0])
    if are_alone:
        assert judge([pair], usual, None, limits=FINE).rule.is_sum
        with pytest.raises(StepError, match="treats samples together"):
            judge([pair, twice], usual, None, limits=FINE)
    else:
        assert judge([pair, twice], usual, None, limits=FINE).rule == usual
