"""What is due before a module's first call is done just before it, or said not to be."""

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.runtime.stage.module_calls import ModuleCalls


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def test_what_is_due_is_done_once_before_the_first_call_of_any_part() -> None:
    module, done = Parent(), list[str]()
    module.second.register_forward_hook(lambda *_: done.append("called"))
    with ModuleCalls(module, has_slices=True) as calls:
        assert calls.before_first(lambda: done.append("due"))
        assert not done
        module.second(torch.zeros(2))
        module(torch.zeros(2))
    assert done == ["due", "called", "called"]


def test_what_was_due_inside_is_not_done_after_it() -> None:
    module, done = Parent(), list[str]()
    calls = ModuleCalls(module, has_slices=True)
    with calls:
        calls.before_first(lambda: done.append("due"))
    with pytest.raises(StepError, match="called outside of a step"):
        module(torch.zeros(2))
    with calls:
        module(torch.zeros(2))
    assert not done


@pytest.mark.parametrize("how", ["in place", "wrapped", "not watched"])
def test_it_is_not_promised_where_calls_are_not_seen(how: str) -> None:
    module = Parent()
    if how == "in place":
        module.compile(backend="eager")
    if how == "wrapped":
        module.second = torch.compile(module.second, backend="eager")  # type: ignore[assignment]
    with ModuleCalls(module, has_slices=how != "not watched") as calls:
        assert not calls.before_first(lambda: None)
