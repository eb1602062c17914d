"""Find out how losses of micro-batches become the loss of the iteration.

Losses that are means are weighted by their micro-batches' numbers of target tokens; sums are added.
Only then does a plan give the gradient that one big device would. Which of both a loss is follows,
in this order, from

1. the strategy's `loss_reduction`, and for a mean the module's own `num_target_tokens(batch)`,
2. how the step made its loss: see `reductions`,
3. the batch's `target_tokens` or `num_target_tokens`, as `PackedBatch` has them.

If none of them tells, the loss is taken for a mean over the targets of the largest loss function
that the step called, or over samples, and the user is warned.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.reading.choices import Choice
from lightning_hetero.models.batches import count_samples
from lightning_hetero.runtime.leaves import tree_leaves
from lightning_hetero.runtime.results.loss_trial import LossTrial
from lightning_hetero.runtime.results.numbers.kinds import (
    TOGETHER,
    UNKNOWN,
    Count,
    Kind,
    Reduction,
)
from lightning_hetero.runtime.results.numbers.reductions import Reductions
from lightning_hetero.runtime.results.numbers.sample_groups import SampleGroups
from lightning_hetero.runtime.results.numbers.torch_calls import tensors_among

__all__ = ["Classification", "LossReduction", "LossWatch", "LossWeight", "weigh_loss"]

_CLASSIFICATION = {F.cross_entropy, F.nll_loss}
_ELEMENTWISE = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
    F.kl_div,
    F.soft_margin_loss,
    F.poisson_nll_loss,
    F.gaussian_nll_loss,
}


_OVER_WEIGHTS = {F.mse_loss, F.l1_loss}
"""Those of them whose mean is divided by the sum of the weights that they are given."""
_LOSSES = _CLASSIFICATION | _ELEMENTWISE


_Suspended = Any
"""The watch itself if it was on top, else a snapshot of its knowledge; None if it was inactive."""


class LossReduction(Choice):
    """Ways in which a training step's loss may sum up the target tokens of its batch."""

    MEAN = "mean"
    SUM = "sum"


class Classification(NamedTuple):
    """The arguments of a call of `F.cross_entropy` or `F.nll_loss`, except the input."""

    target: Tensor
    weight: Tensor | None = None
    size_average: bool | None = None
    ignore_index: int = -100
    reduce: bool | None = None
    reduction: str = "mean"
    label_smoothing: float = 0.0

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> "Classification":
        """Bind the arguments of a call."""
        if args:
            return cls(*args[1:], **kwargs)
        return cls(**{name: item for name, item in kwargs.items() if name != "input"})

    @property
    def counted(self) -> Tensor:
        """Mask of the targets that the mean runs over, if they are class indices."""
        return self.target != self.ignore_index


class LossWatch(TorchFunctionMode):
    """Follows a step's numbers, and how many targets its largest loss function averages over.

    Args:
        constants: See `Reductions`.
        num_samples: See `Reductions`.
        trial: The trial of this micro-batch's loss; None tries none.
    """

    def __init__(
        self,
        constants: Iterable[Tensor] = (),
        num_samples: int = 0,
        trial: LossTrial | None = None,
    ) -> None:
        super().__init__()
        self.reductions = Reductions(constants, num_samples)
        self.groups = SampleGroups(num_samples)
        self.num_targets: Tensor | int | None = None
        self.size = 0
        """Number of targets of that loss, whether they counted or not."""
        self.enters_together = False
        """Whether samples were mixed before the layers."""
        self.outdated: Tensor | None = None
        """A tensor that a layer of another stage changes in place; here it has its old values."""
        self._trial = trial
        self.is_active = False
        self._known_at_pause: dict[int, Any] | None = None

    def resume(self) -> None:
        """Watch what the step calls from now on, with what was known before the first pause."""
        if self._known_at_pause is not None:
            self.reductions.restore(self._known_at_pause)
        self._watch()

    def _watch(self) -> None:
        if not self.is_active:
            self.is_active = True
            torch._C._push_on_torch_function_stack(self)

    def pause(self) -> None:
        """Watch nothing until `resume`, which forgets calls that modes above this one pass on."""
        if self._known_at_pause is None:
            self._known_at_pause = self.reductions.snapshot()
        if self._is_on_top():
            self.stop()

    def stop(self) -> None:
        """Watch nothing until `resume`."""
        if self.is_active:
            self.is_active = False
            torch._C._pop_torch_function_stack()

    def end(self) -> None:
        """Watch no longer."""
        self.stop()
        if self._trial is not None:
            self._trial.end()

    def suspend(self) -> "_Suspended":
        """Watch nothing until `proceed`, which forgets calls that modes above this one pass on."""
        if not self.is_active:
            return None
        if not self._is_on_top():
            return self.reductions.snapshot()
        self.stop()
        return self

    def proceed(self, suspended: "_Suspended") -> None:
        """Watch again as before `suspend`, which has returned `suspended`."""
        if suspended is self:
            self._watch()
        elif suspended is not None:
            self.reductions.restore(suspended)

    def _is_on_top(self) -> bool:
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is self

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function, and follow its result."""
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():
            return func(*args, **kwargs)  # The compiler traces what is called here, too.
        if self.outdated is not None:
            self.check_current((args, kwargs))
        result = func(*args, **kwargs)
        self.groups.follow(func, args, kwargs, result)
        if func not in _LOSSES:
            self.reductions.follow(func, args, kwargs, result)
        else:
            self._see_loss(func, args, kwargs, result)
            given, reduction = tensors_among((*args, *kwargs.values())), kwargs.get("reduction")
            parts = self.reductions.parts
            are_parts = parts.are_any and parts.has(given)
            is_sum = reduction == "sum" and not (are_parts and parts.are_written(given))
            if are_parts and reduction == "none":
                parts.keep(result, given)
            elif (are_parts and not is_sum) or not self.reductions.are_samples(given):
                # Its number of targets still is the best guess of what it averages over.
                is_together = self.reductions.is_any_together(given)
                self.reductions.keep(result, TOGETHER if is_together else UNKNOWN)
        return result

    def see_arguments(self, values: Iterable[Any]) -> None:
        """Note whether samples are mixed in the arguments of the first layer."""
        self.enters_together = self.enters_together or self.reductions.is_any_together(values)

    def check_current(self, values: Any) -> None:
        """Refuse uses of the outdated tensor.

        Raises:
            ModelError: It is among the values, or a view of it is.
        """
        if self.outdated is None:
            return
        memory = self.outdated.untyped_storage().data_ptr()
        for value in tree_leaves(values):
            if type(value) is Tensor and value.untyped_storage().data_ptr() == memory:
                raise ModelError(
                    "The model's first layer changes its input in place, and the model uses that "
                    "input again after the layers, where another stage has it as it was. Let the "
                    "layer work on a copy, or use a plan whose pipelines have one stage."
                )

    def leave_layers(self, output: Any) -> None:
        """Begin anew after the layers, and watch from now on; start the trial, if there is one.

        Args:
            output: What the last layer returned; None if the model has no layers.
        """
        self.num_targets, self.size = None, 0
        self.end()
        if self._trial is not None:
            self._trial.begin(output)  # Below this mode, so that it sees this one's calls, too.
        self.resume()

    def finds_meeting(self, loss: object, found: Reduction | None) -> bool:
        """Whether the trial shows that a loss mixes samples, whatever the rules say of it."""
        trial, self._trial = self._trial, None
        count = found and found.count
        return trial is not None and trial.finds_meeting(loss, count, self.reductions.is_constant)

    def _see_loss(
        self,
        func: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Tensor,
    ) -> None:
        inputs: Any = args[0] if args else kwargs.get("input")
        if kwargs.get("reduction", "mean") == "sum":
            self._keep_sum(result, inputs.numel())
        elif func in _CLASSIFICATION:
            self._see_classification(Classification.of(args, kwargs), result)
        elif kwargs.get("reduction", "mean") == "batchmean":
            self._keep(result, inputs.shape[0], inputs.numel())
        elif kwargs.get("reduction", "mean") == "mean":
            weight = kwargs.get("weight") if func in _OVER_WEIGHTS else None
            targets = inputs.numel() if weight is None else weight.detach().sum()
            self._keep(result, targets, inputs.numel())

    def _see_classification(self, call: Classification, result: Tensor) -> None:
        target = call.target
        if call.reduction == "sum":
            self._keep_sum(result, target.numel())
        elif call.reduction != "mean":
            return
        elif target.is_floating_point():
            # Class probabilities: the mean runs over everything but the classes.
            num_places = target.numel() // max(target.shape[1 if target.ndim > 1 else 0], 1)
            self._keep(result, num_places, num_places)
        elif call.weight is None:
            self._keep(result, call.counted.sum(), target.numel())
        else:
            # Then torch divides by the sum of the targets' class weights.
            weights = call.weight.detach()[torch.where(call.counted, target, 0)]
            self._keep(result, (weights * call.counted).sum(), target.numel())

    def _keep_sum(self, result: Tensor, size: int) -> None:
        self.reductions.keep(result, Reduction(Kind.SUM, count=size, value=result.detach()))

    def _keep(self, result: Tensor, num_targets: Tensor | int, size: int) -> None:
        value = result.detach()
        found = Reduction(Kind.MEAN, count=num_targets, value=value, num_places=size)
        self.reductions.keep(result, found)
        if self.num_targets is None or size > self.size:
            self.num_targets, self.size = num_targets, size


@dataclass(frozen=True)
class LossWeight:
    """How a micro-batch's loss counts in the iteration."""

    kind: Kind
    """MEAN, SUM, UNKNOWN (taken for a mean), or MIXED or TOGETHER, for which no weights exist."""
    targets: Count
    """Targets that a mean averages over; also the weight of logged numbers of unknown kind."""
    others: tuple[Count, ...] = ()
    """The same of further means, if it is a sum of several."""


def weigh_loss(
    by_module: Callable[[Any], Count] | None,
    microbatch: object,
    watch: LossWatch,
    loss: object,
    declared: LossReduction | None,
) -> LossWeight:
    """Return how a micro-batch's loss counts, as the module's docstring says.

    Args:
        by_module: The module's own `num_target_tokens`; None if it has none.
        microbatch: The argument of its step.
        watch: The watch of the step.
        loss: What the step returned.
        declared: The strategy's option.
    """
    found = watch.reductions.of(loss)
    if by_module is not None:
        kind = Kind.SUM if declared is LossReduction.SUM else Kind.MEAN
        return LossWeight(kind, by_module(microbatch))
    is_together = watch.enters_together or _is_together(found)
    if declared is None and (is_together or watch.finds_meeting(loss, found)):
        return LossWeight(Kind.TOGETHER, 1.0)
    if found is not None and found.kind is Kind.MEAN and declared is not LossReduction.SUM:
        if watch.groups.are_in(loss):
            absent = found.count * watch.groups.absent
            found = replace(found, others=(*found.others, absent))
        return LossWeight(Kind.MEAN, found.count, found.others if declared is None else ())
    by_batch = _count_of_batch(microbatch, watch)
    if by_batch is None:
        by_batch = count_samples(microbatch) if watch.num_targets is None else watch.num_targets
        guessed = Kind.UNKNOWN
    else:
        guessed = Kind.MEAN
    if declared is not None:
        return LossWeight(Kind(declared), by_batch)
    if found is not None and found.kind in (Kind.SUM, Kind.MIXED):
        return LossWeight(found.kind, by_batch)
    return LossWeight(guessed, by_batch)


def _is_together(found: Reduction | None) -> bool:
    return found is not None and found.kind in (Kind.TOGETHER, Kind.MAX, Kind.MIN)


def _count_of_batch(microbatch: object, watch: LossWatch) -> Count | None:
    """Return the batch's number of targets, or that of a loss over all its tokens, or None."""
    if watch.num_targets is not None and watch.size == getattr(microbatch, "num_tokens", None):
        return watch.num_targets
    for name in ("target_tokens", "num_target_tokens"):
        by_batch = getattr(microbatch, name, None)
        if by_batch is not None:
            known: Count = by_batch() if callable(by_batch) else by_batch
            return known
    return None
