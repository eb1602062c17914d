"""Judge by gradients how the losses of a micro-batch's halves combine into its own loss.

A micro-batch m and its halves a and b run through the step. Let G be the gradients of their losses
with respect to a few small parameters in the last layer and after it. The check finds the weights
for which G_m = w_a · G_a + w_b · G_b. If the loss is a sum, they are (1, 1); if it is a mean over
targets, the halves' shares of the targets. If no weights fit, samples affect each other, and no
plan gives the gradient of one device. Gradients are compared, since before training the losses of
all parts are about the same. Ranks exchange only `Evidence`.

The check must leave no trace, so `Spared` lets each module work with copies of its buffers,
tensors, lists, dicts, random generators and torchmetrics' states, and gives it back its own
afterwards. Changes elsewhere, such as of a global, aren't undone.
"""

import copy
import math
import pickle
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.results.counts import Counting, LossReduction, LossRule

_TORCHS_OWN = frozenset(vars(nn.Module())) - {"_buffers", "training"}
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class Spared:
    """Context in which steps change only copies of a module's state.

    Args:
        module: The LightningModule.
        evaluates: Whether its parts are in eval mode inside, except batch norms.
    """

    def __init__(self, module: nn.Module, *, evaluates: bool) -> None:
        self._module = module
        self._evaluates = evaluates
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._generators: list[tuple[Any, Any]] = []
        """Each of the module's generators, and the copy in its place."""
        self._copies: dict[int, Any] = {}
        """The copies by the identity of the originals, so that shared objects stay shared."""

    def __enter__(self) -> Self:
        for part in self._module.modules():
            own = vars(part)
            self._kept.append((own, dict(own)))
            for name, value in self._kept[-1][1].items():
                if name not in _TORCHS_OWN:
                    own[name] = self._copied(value)
            if self._evaluates and not isinstance(part, _BatchNorm):
                own["training"] = False
        return self

    def __exit__(self, *_: object) -> None:
        for own, before in self._kept:
            # New attributes stay: Hugging Face sets one to remember that it has registered hooks.
            own.update(before)

    @property
    def has_drawn(self) -> bool:
        """Whether the step has drawn from a generator that the module keeps."""
        return any(_state_of(own) != _state_of(other) for own, other in self._generators)

    def _copied(self, value: Any, depth: int = 2) -> Any:
        if id(value) not in self._copies:
            self._copies[id(value)] = self._copy(value, depth)
        return self._copies[id(value)]

    def _copy(self, value: Any, depth: int) -> Any:
        other: Any
        kind = type(value)
        if kind is Tensor and not value.requires_grad and not value.is_nested:
            return value.clone()
        if depth and kind is list:
            return [self._copied(item, depth - 1) for item in value]
        if depth and kind is dict:
            return {key: self._copied(item, depth - 1) for key, item in value.items()}
        if kind is set:
            return set(value)
        if isinstance(value, _GENERATORS):
            other = copy.deepcopy(value) if kind is not torch.Generator else value.clone_state()  # type: ignore[union-attr]
            self._generators.append((value, other))
            return other
        return value


def _state_of(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return str(generator.get_state().tolist())
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    return pickle.dumps(generator).hex()


_DUE = frozenset({0, *(10**power for power in range(9))})
_AT_ONCE = 2**12
"""Elements of gradients that are multiplied in float64 at a time, which takes twice the memory."""
_FACTOR = 3.0
"""Another rule replaces the usual one if its residual is smaller by this factor."""
Triple = tuple[float, float, float]


def is_due(num_iterations: int) -> bool:
    """Whether an iteration begins with a check, given how many have ended."""
    return num_iterations in _DUE


@dataclass(frozen=True)
class Limits:
    """Relative residuals above which a check refuses, and above which it warns."""

    refuse: float
    warn: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Limits":
        """Return the limits for a dtype in which layers or losses are computed."""
        if torch.finfo(dtype).eps > 1e-5:
            return cls(refuse=2e-2, warn=1.2e-2)
        return cls(refuse=1e-3, warn=1e-4)

    @classmethod
    def of_graph(cls, loss: Tensor) -> "Limits":
        """Return the limits for the coarsest dtype in which a loss's gradient is computed."""
        waiting: list[Any] = [loss.grad_fn]
        seen, dtypes = set(waiting), {loss.dtype}
        while waiting:
            node = waiting.pop()
            dtypes.update(item.dtype for item in getattr(node, "_input_metadata", ()))
            found = {item for item, _ in node.next_functions if item is not None} - seen
            seen |= found
            waiting += found
        limits = [cls.of(item) for item in dtypes if item.is_floating_point]
        return max(limits, key=lambda item: item.refuse)


@dataclass(frozen=True)
class Evidence:
    """What the check has found on one last stage."""

    products: tuple[Triple, Triple, Triple]
    """Scalar products of G_m, G_a and G_b with each other: [m, a, b][m, a, b]."""
    counts: Mapping[Counting, Triple]
    """For each way to count, the targets of m, a and b; the usual way comes first."""
    failure: str = ""
    """The error with which the step of a half ended."""
    empty: tuple[bool, ...] = ()
    """Whether m, a and b gave NaN, as means over nothing do; a sum over nothing is 0."""

    @classmethod
    def of(cls, gradients: Sequence[Tensor], counts: Mapping[Counting, Triple]) -> "Evidence":
        """Make it of the three gradients, each a vector.

        The gradient of a half without targets may be NaN, where its mean divides by zero, and
        counts as zero.
        """
        whole, *halves = gradients
        halves = [item if item.isfinite().all() else torch.zeros_like(item) for item in halves]
        products = torch.zeros(3, 3, dtype=torch.float64)
        for parts in zip(*(torch.split(item, _AT_ONCE) for item in (whole, *halves)), strict=True):
            rows = torch.stack(parts).double()
            products += rows @ rows.T
        first, second, third = (tuple(row) for row in products.tolist())
        empty = tuple(bool(item.isnan().any()) for item in gradients)
        return cls((first, second, third), counts, empty=empty)

    @property
    def is_blind(self) -> bool:
        """Whether nothing follows from it: no gradients, or infinite ones."""
        whole = self.products[0][0]
        parts = max(self.products[1][1], self.products[2][2])
        return bool(self.failure) or not math.isfinite(whole) or max(whole, parts) < 1e-30

    def residual(self, weights: tuple[float, float]) -> float:
        """Return the norm of G_m - w_a · G_a - w_b · G_b, relative to its summands."""
        factors = 1.0, -weights[0], -weights[1]
        pairs = ((i, j) for i in range(3) for j in range(3))
        square = sum(factors[i] * factors[j] * self.products[i][j] for i, j in pairs)
        sizes = [abs(factors[i]) * math.sqrt(max(self.products[i][i], 0.0)) for i in range(3)]
        largest = max(sizes[0], sizes[1] + sizes[2])
        return math.sqrt(max(square, 0.0)) / largest if largest else 0.0

    def best_weights(self) -> tuple[float, float]:
        """Return the w_a and w_b of least squares; the smallest ones if both halves are alike."""
        gram = torch.tensor([row[1:] for row in self.products[1:]], dtype=torch.float64)
        wanted = torch.tensor(self.products[0][1:], dtype=torch.float64)
        first, second = (torch.linalg.pinv(gram, hermitian=True, rtol=1e-10) @ wanted).tolist()
        return first, second

    def weights_of(self, rule: LossRule) -> tuple[float, float] | None:
        """Return the weights that a rule gives the halves; None if it counts nothing here."""
        if rule.is_sum:
            return 1.0, 1.0
        whole, first, second = self.counts.get(rule.counting, (0.0, 0.0, 0.0))
        return (first / whole, second / whole) if whole > 0 else None

    def excludes(self, rule: LossRule) -> bool:
        """Return whether a part gave NaN that by a rule isn't a mean over nothing."""
        counts = self.counts.get(rule.counting, ())
        counted = any(count > 0 for count, empty in zip(counts, self.empty, strict=False) if empty)
        return any(self.empty) and (rule.is_sum or counted)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a check, the same on every rank."""

    rule: LossRule
    is_verified: bool
    residual: float = 0.0
    warning: str = ""

    def __str__(self) -> str:
        how = f"residual {self.residual:.1g}" if self.is_verified else "unverified"
        return f"The loss of training_step is {self.rule} ({how})."


def judge(
    found: Sequence[Evidence],
    before: LossRule,
    declared: LossReduction | None,
    *,
    limits: Limits,
    is_random: bool = False,
    allow_mixing: bool = False,
) -> Verdict:
    """Return how losses count from now on.

    Args:
        found: The evidence of all last stages.
        before: The rule until now.
        declared: The user's `loss_reduction`.
        limits: Those of residuals.
        is_random: Whether steps have drawn random numbers, so that gradients can't be compared.
        allow_mixing: Whether samples may affect each other.

    Raises:
        StepError: No rule fits, or the declared one doesn't.
    """
    failure = next((item.failure for item in found if item.failure), "")
    if failure and not allow_mixing:
        raise StepError(_FAILED.format(failure=failure) + _REMEDIES)
    seen = [item for item in found if not (is_random or item.is_blind)]
    if not seen:
        text = _RANDOM.format(rule=before) if is_random and declared is None else ""
        return Verdict(before, is_verified=False, warning=text)
    rules = _rules(seen, before, declared)
    kept = [rule for rule in rules if not any(item.excludes(rule) for item in found)]
    if not kept and not allow_mixing:
        raise StepError(_NOTHING.format(rule=before) + _REMEDIES)
    residuals = {rule: _largest(seen, rule) for rule in kept or rules}
    best = min(residuals, key=lambda rule: (residuals[rule], rule != before))
    keeps = residuals.get(before, math.inf) <= max(_FACTOR * residuals[best], limits.warn)
    rule = before if keeps else next(i for i in residuals if residuals[i] <= residuals[best] * 1.01)
    size = residuals[rule]
    if size <= limits.warn or allow_mixing:
        return Verdict(rule, is_verified=True, residual=size)
    worst = max(seen, key=lambda item: item.residual(item.weights_of(rule) or (0.0, 0.0)))
    first, second = worst.best_weights()
    told = _FOUND.format(
        size=size, rule=rule, first=first, second=second, least=worst.residual((first, second))
    )
    if size <= limits.refuse:
        return Verdict(rule, is_verified=True, residual=size, warning=told)
    is_declared = declared is not None or before.counting.how == "module"
    fits = worst.residual((first, second)) <= limits.refuse
    raise StepError(told + (_DECLARED.format(rule=before) if is_declared and fits else _REMEDIES))


_FAILED = "The step runs on a micro-batch, but not on half of it: {failure}. "
_FOUND = (
    "The gradient of a micro-batch isn't that of its halves put together: they differ by "
    "{size:.2g} of it if the loss is {rule}; by {least:.2g} with the weights that fit best, "
    "{first:.3g} and {second:.3g}. "
)
_NOTHING = (
    "The loss is NaN for a part of a micro-batch, as a mean over nothing is, but {rule} has "
    "something to count there. "
)
_DECLARED = (
    "So the loss isn't {rule}, as it is declared to be. Correct loss_reduction or the module's "
    "num_target_tokens(batch), or leave them out."
)
_REMEDIES = (
    "So the step treats samples together, in the layers or in the loss (statistics over the batch, "
    "pairs of samples, the hardest ones), or weighs them in a way that isn't known. Return a sum "
    "or a mean over samples or targets; or count what a mean is over by num_target_tokens(batch) "
    "in the module; or accept that samples meet only inside micro-batches, as under DDP inside a "
    "rank's batch: HeteroStrategy(allow_mixing=True)."
)
_RANDOM = (
    "The step draws random numbers even in eval mode, so whether its loss may be cut can't be "
    "measured. It is taken for {rule}. If it isn't, say so: HeteroStrategy(loss_reduction=...), or "
    "num_target_tokens(batch) in the module."
)


def _rules(
    seen: Sequence[Evidence], before: LossRule, declared: LossReduction | None
) -> list[LossRule]:
    """Return the rules that may hold, the usual ones first; only declared ones if any is."""
    countings = dict.fromkeys(item for evidence in seen for item in evidence.counts)
    means = [LossRule(LossReduction.MEAN, item) for item in countings]
    added = LossRule(LossReduction.SUM, before.counting)
    if declared is LossReduction.SUM:
        return [added]
    if before.counting.how == "module":
        return [before]
    if declared is LossReduction.MEAN:
        return list(dict.fromkeys([before, *means]))
    return list(dict.fromkeys([before, *means[:1], added, *means[1:]]))


def _largest(seen: Sequence[Evidence], rule: LossRule) -> float:
    """Return the largest of the pipelines' residuals under a rule."""
    sizes = []
    for item in seen:
        weights = item.weights_of(rule)
        sizes.append(math.inf if weights is None else item.residual(weights))
    return max(sizes)
