"""The precision plugin of `HeteroStrategy`: dtypes of computations, clipping over all slices.

Backward passes run inside the strategy's step, so Lightning's own `backward` only puts their
gradients into the slices. Clipping by norm needs the norm over the slices of all ranks, each
counted once: one all-reduce of one number.

In fp16, losses are scaled as by torch's `GradScaler`, so that small gradients don't become zero. In
each iteration all ranks learn whether any gradient has overflowed on any rank. If so, no rank makes
the optimizer step, and all lower the scale. So all have the same scale, and a checkpoint saves it
once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning_hetero.strategy.hooks import HookedStrategy

PrecisionName = Literal["32-true", "bf16-mixed", "bf16-true", "16-mixed", "16-true"]

_DTYPES: dict[str, tuple[torch.dtype, torch.dtype | None]] = {
    "32-true": (torch.float32, None),
    "bf16-mixed": (torch.bfloat16, torch.float32),
    "bf16-true": (torch.bfloat16, torch.bfloat16),
    "16-mixed": (torch.float16, torch.float32),
    "16-true": (torch.float16, torch.float16),
}

_REASONS = {
    "64-true": "propagation in float64 isn't supported",
    "transformer-engine": "its modules aren't supported",
    "transformer-engine-float16": "its modules aren't supported",
}


class HeteroPrecision(Precision):
    """Compute in `compute_dtype`; store and update slices in `master_dtype`.

    Args:
        precision: "32-true"; "bf16-mixed" (bf16 weights under autocast in steps, fp32 slices) or
            "bf16-true" (both bf16); "16-mixed", with scaled losses, and "16-true" the same in fp16.
        scaler: The scaler of "16-mixed", for its first scale and its rule of change.
    """

    def __init__(
        self, precision: PrecisionName = "32-true", scaler: GradScaler | None = None
    ) -> None:
        if precision not in _DTYPES:
            reason = _REASONS.get(str(precision), "it isn't supported")
            raise ConfigurationError(
                f"precision={precision!r} can't be used with HeteroStrategy: {reason}. Choose one "
                f"of {', '.join(_DTYPES)}."
            )
        self.precision = precision
        self.compute_dtype, self.master_dtype = _DTYPES[precision]
        self._plain = Precision()
        """Lightning's own plugin: contexts of steps, and dtypes of what enters them."""
        name: Any = precision
        if name in ("bf16-true", "16-true"):
            self._plain = HalfPrecision(name)
        elif name != "32-true":
            self._plain = MixedPrecision(name, "cpu", scaler)
            scaler = self._plain.scaler
        self.scaler: dict[str, Any] | None = None if scaler is None else scaler.state_dict()
        """The state of a `GradScaler`, updated here; None if losses aren't scaled."""
        self._has_overflow = False
        """Whether gradients have overflowed on any rank since the optimizer's last step."""
        self._strategy: HookedStrategy | None = None

    @classmethod
    def of(cls, plugin: Precision) -> "HeteroPrecision":
        """Return a plugin of this kind for the one that Lightning makes of `precision=`."""
        name: Any = plugin.precision
        return plugin if isinstance(plugin, cls) else cls(name, getattr(plugin, "scaler", None))

    def connect_strategy(self, strategy: "HookedStrategy") -> None:
        """Set the strategy of a run; called by its `setup`."""
        self._strategy = strategy
        if isinstance(self._plain, MixedPrecision):
            self._plain.device = strategy.root_device.type

    @property
    def loss_scale(self) -> float:
        """The factor of losses in backward passes; the same on all ranks."""
        return 1.0 if self.scaler is None else float(self.scaler["scale"])

    def note_gradients(self, *, are_finite: bool) -> None:
        """Note whether an iteration's gradients are finite on all ranks."""
        self._has_overflow |= not are_finite

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: "Callable[[], Any]", **kwargs: Any
    ) -> Any:
        """Step as Lightning does; if losses are scaled, only if no gradient has overflowed."""
        if self.scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        result = closure()
        self._after_closure(model, optimizer)
        has_overflow, self._has_overflow = self._has_overflow, False
        if not has_overflow:
            optimizer.step(**kwargs)
        _update(self.scaler, has_overflow=has_overflow)
        return result

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the scaler's state, as torch's `GradScaler` does."""
        return dict(self.scaler or {})

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the scale of the run that is resumed."""
        if self.scaler is not None:
            self.scaler.update(state_dict)

    @override
    def convert_input(self, data: Any) -> Any:
        """Return a batch; with "bf16-true" its floating-point tensors are bf16, as in Lightning.

        With "bf16-mixed" they stay as they are: targets would lose precision in bf16.
        """
        return self._plain.convert_input(data)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        """Return the module; with "bf16-true" its buffers are bf16, as in Lightning.

        Weights are converted where slices are made of them.
        """
        for part in module.modules():
            part._buffers.update(self.convert_input(dict(part._buffers)))
        return module

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Context of a step: autocast, or 16 bits for new tensors."""
        with self._plain.forward_context():
            yield

    @contextmanager
    def explain_dtypes(self) -> Iterator[None]:
        """Context that adds advice to torch's errors about tensors of two dtypes."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).lower()
            is_short = self.compute_dtype.itemsize == 2
            named = "bfloat16" if self.compute_dtype is torch.bfloat16 else "half"
            if is_short and (named in text or "float16" in text) and "type" in text:
                error.add_note(
                    f"With HeteroStrategy and precision={self.precision!r} weights are {named} in "
                    "steps. Cast the floating-point tensors that meet them, such as "
                    '`x = x.to(self.head.weight.dtype)`; or use "32-true".'
                )
            raise

    @override
    def _after_closure(self, model: LightningModule, optimizer: Any) -> None:
        # Ranks wait for each other in hooks and in clipping, but not in the optimizer's step
        # itself.
        super()._after_closure(model, optimizer)
        if self._strategy is not None:
            self._strategy.begin_change()

    @override
    def backward(  # type: ignore[override]
        self,
        tensor: Tensor,
        model: LightningModule,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        assert self._strategy is not None
        self._strategy.deposit_gradients()

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        assert self._strategy is not None
        parameters = list(self.main_params(optimizer))
        norm = self._strategy.norm_of_gradients(parameters)
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


def _update(scaler: dict[str, Any], *, has_overflow: bool) -> None:
    """Change the scale after a step, as torch's `GradScaler` does."""
    if has_overflow:
        scaler["scale"] *= scaler["backoff_factor"]
        scaler["_growth_tracker"] = 0
        return
    scaler["_growth_tracker"] += 1
    if scaler["_growth_tracker"] == scaler["growth_interval"]:
        scaler["scale"] *= scaler["growth_factor"]
        scaler["_growth_tracker"] = 0
