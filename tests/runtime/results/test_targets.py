"""A micro-batch counts as much as its loss averages over."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.runtime.results.numbers.kinds import Kind, as_weight
from lightning_hetero.runtime.results.targets import LossReduction, LossWatch, weigh_loss


def watched(loss: Any) -> float | None:
    with LossWatch() as watch:
        loss()
    return None if watch.num_targets is None else float(watch.num_targets)


def labels_of(*values: int) -> Tensor:
    return torch.tensor(values)


def test_cross_entropy_counts_targets_that_are_not_ignored() -> None:
    logits, labels = torch.randn(5, 4), labels_of(0, -100, 2, 3, -100)
    assert watched(lambda: F.cross_entropy(logits, labels)) == 3
    assert watched(lambda: F.cross_entropy(logits, target=labels)) == 3
    assert watched(lambda: nn.CrossEntropyLoss()(logits, labels)) == 3
    assert watched(lambda: F.nll_loss(logits, labels)) == 3
    assert watched(lambda: F.cross_entropy(logits, labels.abs() % 4, ignore_index=0)) == 2


def test_class_weights_count_whether_given_by_name_or_place() -> None:
    logits, labels = torch.randn(4, 3), labels_of(0, -100, 2, 2)
    weights = torch.tensor([1.0, 2.0, 4.0])
    assert watched(lambda: F.cross_entropy(logits, labels, weights)) == 9
    assert watched(lambda: F.cross_entropy(logits, labels, weight=weights)) == 9


def test_losses_that_average_over_elements_count_those() -> None:
    a, b = torch.rand(3, 4), torch.rand(3, 4)
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy):
        assert watched(lambda loss=loss: loss(a, b)) == 12


def test_divergences_average_over_rows_or_elements() -> None:
    logs, targets = torch.randn(6, 4).log_softmax(-1), torch.randn(6, 4).softmax(-1)
    assert watched(lambda: F.kl_div(logs, targets, reduction="batchmean")) == 6
    assert watched(lambda: F.gaussian_nll_loss(logs, targets, targets)) == 24


def test_losses_that_do_not_average_count_nothing() -> None:
    logits, labels = torch.randn(5, 4), labels_of(0, 1, 2, 3, 0)
    assert watched(lambda: F.cross_entropy(logits, labels, reduction="sum")) is None
    assert watched(lambda: F.mse_loss(logits, logits, reduction="none")) is None
    assert watched(lambda: logits.mean()) is None


def test_the_largest_of_several_losses_counts() -> None:
    logits, labels = torch.randn(5, 4), labels_of(0, 1, -100, 3, 0)

    def both() -> None:
        F.cross_entropy(logits[:2], labels[:2])
        F.cross_entropy(logits, labels)
        F.mse_loss(logits[:1], logits[:1])

    assert watched(both) == 4


def identity_holds(loss: Any, inputs: Tensor, targets: Tensor, cut: int) -> None:
    """The weighted mean of two parts' losses is the loss of the whole."""
    total, weights = 0.0, 0.0
    for part in (slice(0, cut), slice(cut, None)):
        with LossWatch() as watch:
            value = loss(inputs[part], targets[part])
        assert watch.num_targets is not None
        weight = float(watch.num_targets)
        total += float(value) * weight if weight else 0.0
        weights += weight
    assert total / weights == pytest.approx(float(loss(inputs, targets)), rel=1e-5)


@given(seed=st.integers(0, 100), cut=st.integers(1, 7))
@settings(deadline=None)
def test_weights_make_a_mean_of_means_the_mean_of_all(seed: int, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 4, generator=generator)
    labels = torch.randint(4, (8,), generator=generator)
    labels[torch.rand(8, generator=generator) < 0.3] = -100
    labels[0] = 1
    identity_holds(F.cross_entropy, logits, labels, cut)
    identity_holds(lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1), logits, labels, cut)
    class_weights = torch.tensor([0.1, 2.0, 1.0, 0.5])
    identity_holds(lambda x, y: F.cross_entropy(x, y, weight=class_weights), logits, labels, cut)
    identity_holds(
        lambda x, y: F.nll_loss(F.log_softmax(x, 1), y, weight=class_weights), logits, labels, cut
    )
    identity_holds(F.mse_loss, logits, logits.flip(0), cut)


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2)])
def test_class_probabilities_average_over_places_not_classes(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(shape), torch.rand(shape).softmax(1)
    numel = logits.numel() // shape[1]
    assert watched(lambda: F.cross_entropy(logits, targets)) == numel
    identity_holds(F.cross_entropy, logits, targets, 2)


class Step:
    """What a step did and returned."""

    def __init__(self, make: Any, declared: LossReduction | None = None) -> None:
        self.declared = declared
        with LossWatch() as self.watch:
            self.loss = make()

    def weigh(self, module: object, batch: object) -> tuple[Kind, float]:
        by_module = getattr(module, "num_target_tokens", None)
        found = weigh_loss(by_module, batch, self.watch, self.loss, self.declared)
        return found.kind, float(found.targets)


def cross_entropy() -> Tensor:
    return F.cross_entropy(torch.randn(6, 4), labels_of(0, -100, 2, 3, 1, 1))


def unclear() -> Tensor:
    return cross_entropy().abs()


ROWS = [torch.zeros(3, 2)]


def test_the_module_knows_better_than_the_loss_and_the_loss_than_the_batch() -> None:
    module = SimpleNamespace(num_target_tokens=lambda batch: batch.size * 10)
    batch = SimpleNamespace(num_target_tokens=lambda: 7, size=2)
    assert Step(cross_entropy).weigh(module, batch) == (Kind.MEAN, 20)
    assert Step(cross_entropy).weigh(object(), batch) == (Kind.MEAN, 5)
    assert Step(unclear).weigh(object(), batch) == (Kind.MEAN, 7)
    assert Step(unclear).weigh(object(), SimpleNamespace(target_tokens=8)) == (Kind.MEAN, 8)


def test_what_is_not_known_is_taken_for_a_mean_and_called_unknown() -> None:
    assert Step(unclear).weigh(object(), ROWS) == (Kind.UNKNOWN, 5)
    assert Step(lambda: torch.ones(())).weigh(object(), ROWS) == (Kind.UNKNOWN, 3)


def test_what_needs_all_samples_at_once_has_no_weight_unless_the_user_says_so() -> None:
    def root() -> Tensor:
        return cross_entropy().sqrt()

    assert Step(root).weigh(object(), SimpleNamespace(target_tokens=8))[0] is Kind.TOGETHER
    assert Step(root, LossReduction.MEAN).weigh(object(), ROWS) == (Kind.MEAN, 5)


def test_the_user_may_say_what_the_loss_is() -> None:
    for declared, kind in ((LossReduction.SUM, Kind.SUM), (LossReduction.MEAN, Kind.MEAN)):
        assert Step(unclear, declared).weigh(object(), ROWS) == (kind, 5)
        assert Step(lambda: ROWS[0].sum(), declared).weigh(object(), ROWS)[0] is kind


def test_a_loss_over_all_tokens_knows_better_than_the_batch_whose_labels_a_step_replaced() -> None:
    batch = SimpleNamespace(num_target_tokens=5, num_tokens=6)
    labels = labels_of(1, -100, 2, -100, -100, 0)
    replaced = Step(lambda: F.cross_entropy(torch.randn(6, 4), labels).abs())
    assert replaced.weigh(object(), batch) == (Kind.MEAN, 3)
    some = Step(lambda: F.cross_entropy(torch.randn(4, 4), labels[:4]).abs())
    assert some.weigh(object(), batch) == (Kind.MEAN, 5)


def test_weights_are_exact_for_many_tokens() -> None:
    weight = as_weight(2**24 + 1, torch.device("cpu"))
    assert weight.dtype == torch.float64
    assert int(weight) == 2**24 + 1
