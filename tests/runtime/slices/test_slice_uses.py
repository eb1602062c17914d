"""What optimizers do to slices is let be if it does the same to the whole."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.slices.slice_uses import SliceUses

Parameters = list[nn.Parameter]


def use(shape: tuple[int, ...], make: Callable[[Parameters], Callable[[], Any]]) -> None:
    """Do something to slices of a shape, twice."""
    slices = {name: nn.Parameter(torch.randn(shape)) for name in "abc"}
    whole = SimpleNamespace(shape=(2 * shape[0] + 1, *shape[1:]))
    store: Any = SimpleNamespace(masters=slices, specs=dict.fromkeys(slices, whole))
    uses, do = SliceUses(store), make(list(slices.values()))
    for _ in range(2):
        for item in slices.values():
            item.grad = torch.randn(shape)
        uses.start()
        try:
            do()
        finally:
            assert uses.stop()


@pytest.mark.parametrize("shape", [(3, 4), (1,), (0, 4)])
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_what_goes_by_elements_is_let_be(shape: tuple[int, ...], options: dict[str, bool]) -> None:
    use(shape, lambda items: torch.optim.AdamW(items, amsgrad=True, **options).step)


def test_what_takes_only_a_form_is_let_be() -> None:
    use((3, 4), lambda items: lambda: [item.new_zeros(1) + item.new_tensor(0.0) for item in items])
    with pytest.raises(StepError, match="norm is called on parameter a"):
        use((3, 4), lambda items: lambda: [item.grad.norm() for item in items])
