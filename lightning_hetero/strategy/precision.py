"""The precision plugin of `HeteroStrategy`: which dtype computes, and clipping over all slices.

A backward runs inside the strategy's step, so Lightning's own `backward` only hands the finished
gradients over to the slices. Clipping by norm needs the norm over every rank's slices, each counted
once, which is one all-reduce of one number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["HeteroPrecision", "PrecisionName"]

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true"]

_DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
}

_REASONS = {
    "16-mixed": "its GradScaler would skip steps on some ranks and not on others",
    "16-true": "gradients would underflow without a scaler, and a scaler can't agree across stages",
    "64-true": "propagation in float64 isn't supported",
    "transformer-engine": "its modules aren't supported",
    "transformer-engine-float16": "its modules aren't supported",
}


class HeteroPrecision(Precision):
    """Compute in `compute_dtype`, keep and update slices in `master_dtype`.

    Args:
        precision: "32-true"; "bf16-mixed" (bf16 weights under autocast in steps, fp32 slices) or
            "bf16-true" (both bf16).
    """

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in _DTYPES:
            reason = _REASONS.get(str(precision), "it isn't supported")
            raise ConfigurationError(
                f"precision={precision!r} can't be used with HeteroStrategy: {reason}. Choose one "
                f"of {', '.join(_DTYPES)}."
            )
        self.precision = precision
        self.compute_dtype, self.master_dtype = _DTYPES[precision]
        self.deposit_gradients: Callable[[], None] | None = None
        """Set by the strategy: moves the iteration's gradients into the slices."""
        self.norm_of_gradients: Callable[[Iterable[Tensor]], Tensor] | None = None
        """Set by the strategy: returns the norm of parameters' gradients over all ranks."""
        self.device_type = "cpu"
        """Set by the strategy: the kind of device on which steps run."""
        self.begin_change: Callable[[], None] | None = None
        """Set by the strategy: called when an optimizer is about to change the slices."""

    @classmethod
    def of(cls, plugin: Precision) -> "HeteroPrecision":
        """Return a plugin of this kind for the one that Lightning makes of `precision=`."""
        name: Any = plugin.precision
        return plugin if isinstance(plugin, cls) else cls(name)

    @override
    def convert_input(self, data: Any) -> Any:
        """Return a batch, with "bf16-true" its floating-point tensors in bf16, as in Lightning.

        With "bf16-mixed" they stay as they are: targets in bf16 would lose digits.
        """
        if self.precision != "bf16-true":
            return data
        return apply_to_collection(data, Tensor, _in_bf16)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module, with "bf16-true" its buffers in bf16, as in Lightning.

        Weights are converted where slices are made of them.
        """
        if self.precision == "bf16-true":
            for part in module.modules():
                held = {name: item for name, item in part._buffers.items() if item is not None}
                part._buffers.update({name: _in_bf16(item) for name, item in held.items()})
        return module

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Give the context of a step, as in Lightning: autocast, or bf16 for new tensors."""
        if self.precision == "bf16-mixed":
            with torch.autocast(self.device_type, torch.bfloat16):
                yield
        elif self.precision == "bf16-true":
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            try:
                yield
            finally:
                torch.set_default_dtype(before)
        else:
            yield

    @contextmanager
    def explain_dtypes(self) -> Iterator[None]:
        """Add a remedy to torch's errors about tensors of two dtypes inside this context."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            if self.compute_dtype is torch.bfloat16 and "bfloat16" in text and "type" in text:
                error.add_note(
                    f"With HeteroStrategy and precision={self.precision!r} weights are bf16 in "
                    "steps. Cast the floating-point tensors that meet them, such as "
                    '`x = x.to(self.head.weight.dtype)`; or use "32-true".'
                )
            raise

    @override
    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        # Hooks and clipping, in which ranks wait for each other; the step itself waits for nobody.
        super()._after_closure(model, optimizer)
        if self.begin_change is not None:
            self.begin_change()

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        assert self.deposit_gradients is not None
        self.deposit_gradients()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self.norm_of_gradients is not None
        parameters = list(self.main_params(optimizer))
        norm = self.norm_of_gradients(parameters)
        factor = torch.clamp(clip_val / (norm + 1e-6), max=1.0)
        for parameter in parameters:
            if (gradient := parameter.grad) is not None:
                gradient.mul_(factor.to(device=gradient.device, dtype=gradient.dtype))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        # Not torch's: it refuses a rank that owns no slice with a gradient.
        for parameter in self.main_params(optimizer):
            if parameter.grad is not None:
                parameter.grad.clamp_(min=-clip_val, max=clip_val)


def _in_bf16(tensor: Tensor) -> Tensor:
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
