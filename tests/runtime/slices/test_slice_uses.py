"""What optimizers do to slices is let be if it does the same to the whole."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.slices.slice_uses import SliceUses

Parameters = list[nn.Parameter]


def use(
    shape: tuple[int, ...],
    make: Callable[[Parameters], Callable[[], Any]],
    num_unwatched: int = 0,
) -> None:
    """Do something to slices of a shape, twice, after some times that nobody watches."""
    slices = {name: nn.Parameter(torch.randn(shape)) for name in "abc"}
    whole = SimpleNamespace(shape=(2 * shape[0] + 1, *shape[1:]))
    kept = dict.fromkeys(slices, ((0, shape[0]),))
    store: Any = SimpleNamespace(masters=slices, specs=dict.fromkeys(slices, whole), kept=kept)
    uses, do = SliceUses(store), make(list(slices.values()))
    for time in range(num_unwatched + 2):
        for item in slices.values():
            item.grad = torch.randn(shape)
        if time >= num_unwatched:
            uses.start()
        try:
            do()
        finally:
            assert uses.stop() is (time >= num_unwatched)


@pytest.mark.parametrize("shape", [(3, 4), (1,), (0, 4)])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("num_unwatched", [0, 1])
def test_what_goes_by_elements_is_let_be(
    shape: tuple[int, ...], options: dict[str, bool], num_unwatched: int
) -> None:
    make = partial(torch.optim.AdamW, amsgrad=True, **options)
    use(shape, lambda items: make(items).step, num_unwatched)


@pytest.mark.parametrize("kind", ["SGD", "NAdam", "RAdam", "Adamax", "RMSprop", "Rprop", "Adagrad"])
@pytest.mark.parametrize("foreach", [True, False])
def test_torchs_optimizers_that_go_by_elements_are_let_be(kind: str, foreach: bool) -> None:  # noqa: FBT001
    make = partial(getattr(torch.optim, kind), foreach=foreach)
    use((3, 4), lambda items: make(items).step, num_unwatched=1)


def test_norms_of_lists_are_refused() -> None:
    with pytest.raises(StepError, match="foreach_norm is called on parameter a"):
        use((3, 4), lambda items: lambda: torch._foreach_norm([item.grad for item in items]))


def test_what_takes_only_a_form_is_let_be() -> None:
    use((3, 4), lambda items: lambda: [item.new_zeros(1) + item.new_tensor(0.0) for item in items])
    with pytest.raises(StepError, match="norm is called on parameter a"):
        use((3, 4), lambda items: lambda: [item.grad.norm() for item in items])
