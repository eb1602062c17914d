"""Count the target tokens behind a loss, which is a mean over them.

A micro-batch with n target tokens counts n times as much as one with a single token: only then does
a plan give the gradient that one big device would. The number is taken, in this order, from

1. the module's own `num_target_tokens(batch)`, if it has that method,
2. the batch's `target_tokens` or `num_target_tokens`, as `PackedBatch` has them, unless 3 has seen
   a loss over all its `num_tokens`: the step may have chosen other targets, as masked language
   models do,
3. the mean-reduced loss functions of torch that the step calls behind the model (cross entropy
   counts the targets that aren't ignored, others the elements averaged),
4. the number of samples in the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_hetero.runtime.microbatches import count_samples

__all__ = ["Classification", "LossWatch", "as_weight", "count_targets"]

_CLASSIFICATION = {F.cross_entropy, F.nll_loss}
_ELEMENTWISE = {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The arguments of a call of `F.cross_entropy` or `F.nll_loss`, but for the input."""

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
        bound = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        bound.pop("input")
        return cls(**bound)

    @property
    def counted(self) -> Tensor:
        """Which targets the mean runs over, where they are class indices."""
        return self.target != self.ignore_index


_ARGUMENTS = ("input", *(field.name for field in fields(Classification)))


class LossWatch(TorchFunctionMode):
    """Records how many targets the largest mean-reduced loss of a step averages over."""

    def __init__(self) -> None:
        super().__init__()
        self.num_targets: Tensor | int | None = None
        self.size = 0
        """Targets of that loss, whether they counted or not."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at losses on their way to torch."""
        kwargs = kwargs or {}
        if func in _CLASSIFICATION:
            self._see_classification(Classification.of(args, kwargs))
        elif func in _ELEMENTWISE and kwargs.get("reduction", "mean") == "mean":
            inputs = args[0] if args else kwargs["input"]
            self._keep(inputs.numel(), inputs.numel())
        return func(*args, **kwargs)

    def forget(self) -> None:
        """Begin anew."""
        self.num_targets, self.size = None, 0

    def _see_classification(self, call: Classification) -> None:
        target = call.target
        if call.reduction != "mean":
            return
        if target.is_floating_point():
            # Class probabilities: the mean runs over everything but the classes.
            num_places = target.numel() // max(target.shape[1 if target.ndim > 1 else 0], 1)
            self._keep(num_places, num_places)
        elif call.weight is None:
            self._keep(call.counted.sum(), target.numel())
        else:
            # Then torch divides by the sum of the targets' class weights.
            weights = call.weight.detach()[torch.where(call.counted, target, 0)]
            self._keep((weights * call.counted).sum(), target.numel())

    def _keep(self, num_targets: Tensor | int, size: int) -> None:
        if self.num_targets is None or size > self.size:
            self.num_targets, self.size = num_targets, size


def count_targets(module: object, microbatch: object, watch: LossWatch) -> Tensor | int:
    """Return the number of target tokens of a micro-batch, as the module's docstring says."""
    seen, num_tokens = watch.num_targets, getattr(microbatch, "num_tokens", None)
    by_module = getattr(module, "num_target_tokens", None)
    if by_module is not None:
        count: Tensor | int = by_module(microbatch)
        return count
    if seen is None or watch.size != num_tokens:
        for name in ("target_tokens", "num_target_tokens"):
            by_batch = getattr(microbatch, name, None)
            if by_batch is not None:
                known: Tensor | int = by_batch() if callable(by_batch) else by_batch
                return known
    return count_samples(microbatch) if seen is None else seen


def as_weight(num_targets: Tensor | int, device: torch.device) -> Tensor:
    """Return a count as a float64 tensor without waiting for the device."""
    if isinstance(num_targets, Tensor):
        return num_targets.to(device=device, dtype=torch.float64)
    return torch.tensor(float(num_targets), dtype=torch.float64, device=device)
