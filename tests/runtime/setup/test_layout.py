"""Finding layers and parameters in modules of several shapes."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_hetero.core.errors import ModelError
from lightning_hetero.exchange.slices import OuterRole
from lightning_hetero.runtime.setup.layout import ModelLayout, find_layers
from tests.toy import GPT

FIRST, LAST = frozenset({OuterRole.FIRST}), frozenset({OuterRole.LAST})


def linears(count: int, width: int = 4) -> list[nn.Module]:
    return [nn.Linear(width, width) for _ in range(count)]


class Wrapped(nn.Module):
    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.mix(hidden)


class Recurrence(Attention):
    def forward(self, hidden: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        return self.mix(hidden)


class Pooling(Attention):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return self.mix(pixels)


LISTS: dict[str, nn.Module] = {
    "small": nn.ModuleList(linears(9, 2)),
    "large": nn.ModuleList(linears(2, 16)),
    "largest": nn.Sequential(*linears(2, 32)),
    "hybrid": nn.ModuleList([Attention(64), Recurrence(64)]),
    "one": nn.ModuleList(linears(1)),
    # No layers: of several kinds, called otherwise, without parameters, tables, or no list.
    "mixed": nn.ModuleList([nn.Linear(64, 64), nn.LayerNorm(64)]),
    "unlike": nn.ModuleList([Attention(64), Pooling(64)]),
    "dropouts": nn.ModuleList([nn.Dropout(), nn.Dropout()]),
    "tables": nn.ModuleList([nn.Embedding(500, 8), nn.Embedding(500, 8)]),
    "alone": nn.Sequential(nn.Linear(64, 64)),
    "normed": spectral_norm(nn.Linear(64, 64)),
    "empty": nn.ModuleList(),
}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("small", "large", "mixed", "tables"), "large"),
        (("small", "largest", "large"), "largest"),
        (("hybrid", "largest"), "hybrid"),
        (("unlike", "small"), "small"),
        (("one",), "one"),
        (("mixed", "unlike", "dropouts", "tables", "alone", "normed", "empty"), None),
    ],
)
def test_layers_are_the_list_of_like_modules_with_most_parameters(
    names: tuple[str, ...], expected: str | None
) -> None:
    layers = () if expected is None else tuple(LISTS[expected].children())
    module = Wrapped(**{name: LISTS[name] for name in names})
    assert find_layers(module, None) == (expected, layers)


def test_a_module_without_layers_is_one_layer() -> None:
    layout = ModelLayout.of(nn.Linear(4, 4))
    assert layout.num_layers == 1
    assert [spec.layer for spec in layout.specs] == [0, 0]
    with pytest.raises(ModelError, match=r"no list of layers.*HeteroStrategy\(layers="):
        layout.require_layers()


def test_named_layers_come_before_what_would_be_found() -> None:
    module = Wrapped(small=nn.ModuleList(linears(3, 2)), large=nn.ModuleList(linears(2, 16)))
    assert find_layers(module, "small") == ("small", tuple(module.small))
    mixed = Wrapped(mixed=nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)]))
    assert find_layers(mixed, "mixed")[1] == tuple(mixed.mixed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("blocks", r"layers='blocks' names no submodule of Wrapped.*\['body'\]"),
        ("head", r"layers='head' is a Linear"),
        ("none", r"layers='none' is a ModuleList with 0 children"),
    ],
)
def test_wrong_names_are_refused_with_what_there_is(name: str, message: str) -> None:
    module = Wrapped(body=nn.ModuleList(linears(2)), head=nn.Linear(4, 4), none=nn.ModuleList())
    with pytest.raises(ModelError, match=message):
        find_layers(module, name)


def test_outer_parameters_take_the_end_at_which_they_are_registered() -> None:
    layout = ModelLayout.of(GPT(2, 8, tied=False))
    roles = {spec.name: spec.roles for spec in layout.specs if spec.layer is None}
    assert roles == {
        "wpe": FIRST,
        "wte.weight": FIRST,
        "ln_f.weight": LAST,
        "ln_f.bias": LAST,
        "head.weight": LAST,
    }
    assert all(not spec.roles for spec in layout.specs if spec.layer is not None)


def test_a_tied_parameter_is_one_with_two_slots_and_both_roles() -> None:
    model = GPT(2, 8, tied=True)
    layout = ModelLayout.of(model)
    names = [spec.name for spec in layout.specs]
    assert "head.weight" not in names
    tied = next(spec for spec in layout.specs if spec.name == "wte.weight")
    assert tied.roles == FIRST | LAST
    assert [slot.name for slot in layout.slots["wte.weight"]] == ["wte.weight", "head.weight"]
    assert all(slot.current is model.wte.weight for slot in layout.slots["wte.weight"])


def test_parameters_shared_between_layers_are_refused() -> None:
    layers = nn.ModuleList(linears(2))
    layers[1].weight = layers[0].weight
    with pytest.raises(ModelError, match=r"0\.weight is shared between layers"):
        ModelLayout.of(layers)


def test_parameters_that_fp32_cannot_carry_are_refused() -> None:
    for dtype, remedy in ((torch.complex64, "view_as_complex"), (torch.float64, "module to fp32")):
        module = Wrapped(body=nn.ModuleList(linears(2)))
        module.scale = nn.Parameter(torch.ones(3, dtype=dtype), requires_grad=False)
        with pytest.raises(ModelError, match=rf"scale is .*{remedy}"):
            ModelLayout.of(module)
