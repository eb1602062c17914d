"""Divide attention heads among the ranks of a group, whatever the number of key and value heads.

Each rank computes consecutive query heads, and holds the key and value heads that these read. If
the degree doesn't divide the key heads (grouped-query and multi-query attention), several ranks
hold the same key head: `ParameterSpec.rows_of` says which, and owners sum their gradients.

Attention modules expect every key head to be read by the same number of query heads. But a rank's
query heads may begin or end in the middle of such a group. So its key heads are repeated after the
projection until the same number of query heads reads each, and while the module runs its number of
groups is that of the rank.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import gcd
from typing import Any

from torch import Tensor, nn

from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.runtime.tensor_parallel.styles import layer_of

_HEAD_DIMS = ("head_dim", "head_size", "attention_head_size")
_GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a layer in an attention module."""

    count: int
    """Number of heads in each block of the layer's output features."""
    blocks: int
    attention: str
    """Name of the module around the layer."""
    readers: int = 1
    """Number of query heads that read each head; 1 also if the module can't share heads."""
    attribute: str | None = None
    """The module's attribute that has `readers`; None if it takes any numbers of heads."""

    def read(self, tp_rank: int, tp_degree: int) -> tuple[list[int], int]:
        """Return a rank's key heads, counted from its first, and the query heads that read each.

        A key head is repeated if more of the rank's query heads read it than read another one.
        """
        share = self.count * self.readers // tp_degree
        first, stop = tp_rank * share, (tp_rank + 1) * share
        inner = range((first // self.readers + 1) * self.readers, stop, self.readers)
        run = gcd(*(b - a for a, b in pairwise((first, *inner, stop))))
        before = first // self.readers
        return [query // self.readers - before for query in range(first, stop, run)], run

    def repeat(self, output: Tensor, index: list[int]) -> Tensor:
        """Return a projection's output with the heads of an index in each block."""
        if index == list(range(index[-1] + 1)):
            return output
        heads = output.view(*output.shape[:-1], self.blocks, index[-1] + 1, -1)
        return heads[..., index, :].flatten(-3)


def find_heads(
    root: nn.Module, layers: set[str], specs: Iterable[ParameterSpec]
) -> dict[str, Heads]:
    """Return the heads of the column-parallel layers inside attention modules, by layer."""
    found: dict[str, Heads] = {}
    most: dict[str, int] = {}
    for spec in specs:
        layer = _layer_of(spec)
        if layer not in layers or spec.tp_dim is None or spec.tp_uneven:
            continue
        name = layer.rpartition(".")[0]
        count = _num_heads(root.get_submodule(name), spec.cut_length // spec.tp_blocks)
        most[name] = max(count, most.get(name, 0))
        if count:
            found[layer] = Heads(count=count, blocks=spec.tp_blocks, attention=name)
    for layer, heads in found.items():
        attention: Any = root.get_submodule(heads.attention)
        readers, rest = divmod(most[heads.attention], heads.count)
        attribute = next((i for i in _GROUPS if getattr(attention, i, 0) == readers), None)
        takes_any = attribute is not None or getattr(attention, "takes_any_heads", False)
        if takes_any and not rest:
            found[layer] = replace(heads, readers=readers, attribute=attribute)
    return found


def with_heads(spec: ParameterSpec, heads: Mapping[str, Heads]) -> ParameterSpec:
    """Return a parameter with the heads of its layer, if it is cut along them."""
    found = None if spec.tp_dim is None else heads.get(_layer_of(spec))
    return spec if found is None else replace(spec, tp_heads=found.count, tp_readers=found.readers)


def _layer_of(spec: ParameterSpec) -> str:
    # The parameters of some adapters have no name after their layer's.
    return layer_of(spec.name).removesuffix(".weight").removesuffix(".bias")


def _num_heads(attention: nn.Module, features: int) -> int:
    """Return the number of heads in a layer's output features; 0 if they aren't heads."""
    sizes = (getattr(attention, name, None) for name in _HEAD_DIMS)
    size = next((item for item in sizes if isinstance(item, int)), 0)
    if not size:
        return 0
    count = 0 if features % size else features // size
    config: Any = getattr(attention, "config", None)
    query: int = getattr(config, "num_attention_heads", None) or features
    if features % query == 0 and count % query == 0:
        return query  # Projections that are fused head by head have more features.
    if count <= query:
        return count
    shared: int = getattr(config, "num_key_value_heads", None) or 1
    return shared  # Fused group by group.
