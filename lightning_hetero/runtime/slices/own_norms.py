"""Refuse to clip gradients by the norm of one rank's slices, which is no norm of the model's."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["no_norm_of_slices"]


@contextmanager
def no_norm_of_slices(store: SliceStore) -> Iterator[None]:
    """Refuse `torch.nn.utils.clip_grad_norm_` on a store's gradients inside this context."""
    # It takes no hook, and its users have imported it long ago: what it calls is replaced.
    original: Any = vars(clip_grad)["_get_total_norm"]

    def norm_of(tensors: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        own = {id(master.grad) for master in store.masters.values() if master.grad is not None}
        if any(id(item) in own for item in given):
            raise StepError(
                "torch.nn.utils.clip_grad_norm_ is called in a hook, where every rank has only its "
                "slices of the gradients, so each would clip by a norm of its own. Use "
                "Trainer(gradient_clip_val=...), or self.clip_gradients in "
                "configure_gradient_clipping: they take the norm over all ranks."
            )
        return original(given, *args, **kwargs)

    vars(clip_grad)["_get_total_norm"] = norm_of
    try:
        yield
    finally:
        vars(clip_grad)["_get_total_norm"] = original
