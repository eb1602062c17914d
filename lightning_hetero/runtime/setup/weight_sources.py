"""Find weights that a module can read, such as those of a pretrained model's folder.

A module names what it can read by an attribute `weight_source`; names are relative to that module.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.models.stored import Box

__all__ = ["BoxReader", "WeightSource", "WeightSources"]

BoxReader = Callable[[Box], Tensor]
"""Returns a box of one parameter or buffer, on CPU."""


class WeightSource(Protocol):
    """The type of a module's attribute `weight_source`."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the parameters and buffers that it has, by their names in the module."""

    def read(self, name: str, box: Box) -> Tensor:
        """Return a box, which isn't empty, of the named tensor, on CPU, in any dtype."""


class WeightSources:
    """The weight sources of all modules inside one module."""

    def __init__(self, module: nn.Module) -> None:
        self._sources: list[tuple[str, WeightSource]] = [
            (f"{prefix}." if prefix else "", item.weight_source)
            for prefix, item in module.named_modules()
            if hasattr(item, "weight_source")
        ]

    def find(self, names: Iterable[str], shape: tuple[int, ...]) -> BoxReader | None:
        """Return a reader of the tensor with one of these names, None if no source has it.

        Raises:
            ModelError: A source has it in another shape.
        """
        for name in names:
            for prefix, source in self._sources:
                own = name.removeprefix(prefix)
                if not name.startswith(prefix) or own not in source.shapes:
                    continue
                if source.shapes[own] != shape:
                    raise ModelError(
                        f"{name} has shape {shape}, but {source.shapes[own]} in the weight_source "
                        "of its module. Change its size after it was read, or read it whole."
                    )
                return partial(source.read, own)
        return None

    def check_all_used(self, module: nn.Module, drawn: Sequence[str]) -> None:
        """Raise ModelError if sources have weights for names that the module no longer has.

        Parameters in `drawn`, about to be drawn anew, may then be such weights under a new name.
        """
        known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in module.named_buffers()}
        unused = [
            name
            for prefix, source in self._sources
            for name in map(prefix.__add__, source.shapes)
            if name not in known
        ]
        if unused:
            raise ModelError(
                f"The module was changed after it was given its weight_source: {unused[:3]} and "
                f"{max(len(unused) - 3, 0)} more aren't in it, but {list(drawn)[:3]} and "
                f"{max(len(drawn) - 3, 0)} more would be drawn anew. Build what you add on CPU, or "
                "change a model that was read whole."
            )
