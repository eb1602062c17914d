"""Find where sequence parallelism must gather tokens: at the modules around sharded pairs.

A *region* is the module that holds both ends of a sharded pair (query and output projection, gate
and down projection), or a module of experts. Inside it all tokens meet shards of weights; outside
it whole weights meet shards of tokens, so their gradients are summands.
"""

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.tensor_parallel.plan import ShardedModule, ShardingPlan
from lightning_hetero.runtime.tensor_parallel.styles import TPStyle

__all__ = ["find_regions", "with_partial_gradients"]

_ENDS = (TPStyle.ROWWISE, TPStyle.SPLIT)
_BEGINNINGS = (TPStyle.COLWISE, TPStyle.GATHERED)


def find_regions(
    root: nn.Module, layout: ModelLayout, sharding: ShardingPlan
) -> dict[str, nn.Module]:
    """Return the regions by name.

    Raises:
        ModelError: A sharded module of a layer lies in no region, or a region has whole weights
            whose gradients would be counted once for each rank.
    """
    inner = [item for item in sharding.modules if _is_in_layer(layout, item)]
    experts = {item.name for item in inner if item.style is TPStyle.EXPERTS}
    regions = experts | {
        _parent(item) for item in inner if item.style in _ENDS and _begins(inner, _parent(item))
    }
    for item in inner:
        if item.style in (*_ENDS, *_BEGINNINGS) and _parent(item) not in regions:
            raise _impossible(
                f"{item.name} is sharded, but the module around it doesn't hold both a module that "
                "begins and one that ends a sharded region"
            )
    ends = {item.name for item in inner if item.style in _ENDS}
    for spec in layout.specs:
        owner, _, attribute = spec.name.rpartition(".")
        inside = any(spec.name.startswith(f"{region}.") for region in regions)
        is_bias = owner in ends and attribute == "bias"
        if inside and spec.tp_dim is None and not spec.tp_partial and not is_bias:
            raise _impossible(f"{spec.name} is whole inside a sharded region")
    return {region: root.get_submodule(region) for region in sorted(regions)}


def with_partial_gradients(layout: ModelLayout, regions: Mapping[str, nn.Module]) -> ModelLayout:
    """Return the layout whose layers' whole weights have partial gradients."""
    specs = tuple(
        replace(spec, tp_partial=True)
        if regions and spec.layer is not None and spec.tp_dim is None
        else spec
        for spec in layout.specs
    )
    return replace(layout, specs=specs)


def _is_in_layer(layout: ModelLayout, item: ShardedModule) -> bool:
    return layout.layers_name is not None and item.name.startswith(f"{layout.layers_name}.")


def _parent(item: ShardedModule) -> str:
    return item.name.rpartition(".")[0]


def _begins(items: list[ShardedModule], parent: str) -> bool:
    return any(item.style in _BEGINNINGS and _parent(item) == parent for item in items)


def _impossible(reason: str) -> ModelError:
    return ModelError(
        f"sequence_parallel=True isn't possible for this model: {reason}. Use "
        "HeteroStrategy(sequence_parallel=False)."
    )
