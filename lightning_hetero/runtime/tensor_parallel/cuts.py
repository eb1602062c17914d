"""Decide along which dim tensor parallelism shards each parameter, and which modules it wraps.

The styles of modules and of single parameters (see `styles`) say how parameters are cut. A tied
parameter is sharded in all of its places or in none.

Under sequence parallelism tokens are gathered around *regions*. A region is the module that has
both ends of a pair of sharded layers (query and output projection, gate and down projection), or a
module of experts. Inside a region all tokens are used with shards of weights. Outside, shards of
tokens are used with whole weights, so the gradients of these weights are partial.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.runtime.setup.layout import ModelLayout, Slot
from lightning_hetero.runtime.slices.frozen import Opaque, is_opaque
from lightning_hetero.runtime.slices.known_by_shape import KnownByShape, StandIn
from lightning_hetero.runtime.tensor_parallel.heads import Heads, find_heads, with_heads
from lightning_hetero.runtime.tensor_parallel.styles import (
    COLUMNS,
    ROWS,
    Rule,
    TPStyle,
    is_adapter,
    layer_of,
    rule_of_module,
    rules_of,
    with_adapters,
)

_COLUMNS = {*COLUMNS} - {TPStyle.VOCAB}
_WITHOUT_MATRICES = {TPStyle.EXPERTS, TPStyle.LOCAL_SIZES, TPStyle.DORA, TPStyle.DROPOUT}
"""Styles of modules whose parameters have styles of their own."""


@dataclass(frozen=True, kw_only=True)
class ShardedModule:
    """A module whose forward is wrapped for a tensor-parallel group."""

    name: str
    module: nn.Module
    style: TPStyle
    local_sizes: tuple[str, ...] = ()
    """Attributes to divide by the degree."""


@dataclass(frozen=True, kw_only=True)
class ModelCuts:
    """The layout with the parameters' cuts, and the modules to wrap."""

    layout: ModelLayout
    modules: tuple[ShardedModule, ...]
    heads: Mapping[str, Heads]
    """The heads of layers in attention modules, by name."""

    @classmethod
    def of(
        cls, root: nn.Module, layout: ModelLayout, option: Mapping[str, str] | None = None
    ) -> "ModelCuts":
        """Return the cuts that a tensor-parallel plan makes in a module.

        Raises:
            ModelError: There is no plan, or it contradicts itself or the modules.
            ConfigurationError: A style is unknown, or a pattern of the option matches nothing.
        """
        styled = with_adapters(root, rules_of(root, option))
        cuts: dict[str, ParameterSpec] = {}
        modules: dict[str, ShardedModule] = {}
        for name, owner in root.named_modules():
            rule = rule_of_module(styled, name, owner)
            if rule is not None and rule.style is not TPStyle.REPLICATE:
                style = rule.style
                if style is TPStyle.VOCAB:
                    is_table = isinstance(owner, nn.Embedding)
                    style = TPStyle.EMBEDDING if is_table else TPStyle.GATHERED
                modules[name] = ShardedModule(
                    name=name, module=owner, style=style, local_sizes=rule.attributes
                )
        for _ in range(2):
            # Twice, because a tie that is found late may shard a module whose bias came first.
            for spec in layout.specs:
                slots = layout.slots[spec.name]
                found = [_cut_of_slot(styled, modules, slot, spec) for slot in slots]
                cuts[spec.name] = _agree(spec, slots, found, modules)
        for spec in cuts.values():
            if spec.tp_dim is not None and _is_quantized(layout.slots[spec.name][0].current):
                raise ModelError(_QUANTIZED.format(spec.name))
        columns = [name for name, item in modules.items() if item.style is TPStyle.COLWISE]
        heads = find_heads(root, {layer_of(name) for name in columns}, cuts.values())
        specs = tuple(with_heads(cuts[spec.name], heads) for spec in layout.specs)
        cut = replace(layout, specs=specs)
        return cls(layout=cut, modules=tuple(modules.values()), heads=heads)


_QUANTIZED = (
    "Parameter {} is quantized, and tensor parallelism can't cut it. Use a plan with degree 1, "
    "whose stages have fewer layers, or load the model without quantization."
)


def _is_quantized(current: nn.Parameter) -> bool:
    """Whether a parameter, or its stand-in, is of a class that can't be cut."""
    if isinstance(current, StandIn):
        return isinstance(current.source, Opaque)
    return is_opaque(current) and not isinstance(current, KnownByShape)


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear map keeps its weight as (inputs, outputs), as GPT-2's Conv1D does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _cut_of_slot(
    styled: Mapping[str, Rule],
    modules: Mapping[str, ShardedModule],
    slot: Slot,
    spec: ParameterSpec,
) -> ParameterSpec | None:
    """Return a parameter with its cut in one of its slots; None if the plan has none for it."""
    owner_name = slot.name.rpartition(".")[0]
    sharded = modules.get(owner_name)
    rule = rule_of_module(styled, owner_name, slot.module)
    if sharded is None or sharded.style in _WITHOUT_MATRICES:
        bare = styled.get(slot.name)
        return None if bare is None else _cut_bare(bare, spec)
    if sharded.style is TPStyle.PARTIAL:
        return replace(spec, tp_partial=True)
    return _cut_in_module(slot, sharded.style, 1 if rule is None else rule.blocks, spec)


def _cut_bare(rule: Rule, spec: ParameterSpec) -> ParameterSpec:
    """Return a bare parameter with its cut, ([experts,] output features, input features)."""
    num_dims = len(spec.shape)
    if rule.style in _COLUMNS:
        return replace(spec, tp_dim=max(num_dims - 2, 0), tp_blocks=rule.blocks)
    if rule.style in ROWS:
        return replace(spec, tp_dim=num_dims - 1 if num_dims > 1 else None, tp_blocks=rule.blocks)
    return replace(spec, tp_partial=rule.style is TPStyle.PARTIAL)


def _cut_in_module(slot: Slot, style: TPStyle, blocks: int, spec: ParameterSpec) -> ParameterSpec:
    module, attribute = slot.module, slot.attribute
    if style in (TPStyle.EMBEDDING, TPStyle.EMBEDDING_FEATURES):
        if not isinstance(module, nn.Embedding):
            raise ModelError(
                f"The tensor-parallel plan shards {slot.name} as an embedding, but it belongs to a "
                f"{type(module).__name__}. Use another style."
            )
        return replace(spec, tp_dim=0 if style is TPStyle.EMBEDDING else 1, tp_uneven=True)
    if not (isinstance(module, nn.Linear) or is_transposed(module)) or attribute not in (
        "weight",
        "bias",
    ):
        raise ModelError(
            f"The tensor-parallel plan says {style} for {slot.name}, which belongs to a "
            f"{type(module).__name__}. Only Linear, Embedding and GPT-2's Conv1D are sharded as "
            "modules; name the parameters instead, or leave it out."
        )
    columns = style in _COLUMNS
    uneven = style in (TPStyle.GATHERED, TPStyle.SPLIT) and blocks == 1
    dim: int | None = 0 if columns != is_transposed(module) else 1
    if attribute == "bias":
        dim = 0 if columns else None
    return replace(spec, tp_dim=dim, tp_blocks=blocks, tp_uneven=uneven)


def _agree(
    spec: ParameterSpec,
    slots: Sequence[Slot],
    found: Sequence[ParameterSpec | None],
    modules: dict[str, ShardedModule],
) -> ParameterSpec:
    """Return the one cut of a parameter; a tied one is sharded in all its slots or in none."""
    said = [cut for cut in found if cut is not None]
    sharded = next((cut for cut in said if cut.tp_dim is not None), None)
    if sharded is None:
        return said[0] if said else spec
    for slot, cut in zip(slots, found, strict=True):
        if cut is not None and cut.tp_dim is not None:
            if (cut.tp_dim, cut.tp_blocks) != (sharded.tp_dim, sharded.tp_blocks):
                raise ModelError(
                    f"Tied parameter {spec.name} is sharded along dim {sharded.tp_dim} in one "
                    f"place and along dim {cut.tp_dim} in {slot.name}. Give both the same dim."
                )
            continue
        _shard_too(slot, sharded, modules)
    is_uneven = all(cut.tp_uneven for cut in said if cut.tp_dim is not None)
    return replace(sharded, tp_uneven=is_uneven)


def _shard_too(slot: Slot, cut: ParameterSpec, modules: dict[str, ShardedModule]) -> None:
    """Wrap the module at another slot of a tied parameter, so that its output is whole, too."""
    owner = slot.name.rpartition(".")[0]
    style = None
    if cut.tp_dim == 0 and cut.tp_blocks == 1:
        if isinstance(slot.module, nn.Embedding):
            style = TPStyle.EMBEDDING
        elif isinstance(slot.module, nn.Linear):
            style = TPStyle.GATHERED
        elif slot.attribute == "bias":
            return  # A second name for the bias of a Linear (BERT's head); only the Linear uses it.
    if style is None:
        raise ModelError(
            f"Parameter {cut.name} is sharded and also registered as {slot.name} in a "
            f"{type(slot.module).__name__}, where it is needed whole. Leave it out of the "
            "tensor-parallel plan."
        )
    modules[owner] = ShardedModule(name=owner, module=slot.module, style=style)


_BEGINNINGS = (TPStyle.COLWISE, TPStyle.GATHERED)


def find_regions(root: nn.Module, layout: ModelLayout, cuts: ModelCuts) -> dict[str, nn.Module]:
    """Return the regions by name.

    Raises:
        ModelError: A sharded module of a layer is in no region; or a region has whole weights,
            whose gradients would be counted once for each rank.
    """
    name = layout.layers_name
    inner = [i for i in cuts.modules if name is not None and i.name.startswith(f"{name}.")]
    experts = {item.name for item in inner if item.style is TPStyle.EXPERTS}
    beginnings = {_parent(item) for item in inner if item.style in _BEGINNINGS}
    regions = experts | beginnings & {_parent(item) for item in inner if item.style in ROWS}
    for item in inner:
        if item.style in (*ROWS, *_BEGINNINGS) and _parent(item) not in regions:
            raise _impossible(
                f"{item.name} is sharded, but the module around it doesn't hold both a module that "
                "begins and one that ends a sharded region"
            )
    ends = {item.name for item in inner if item.style in ROWS}
    for spec in layout.specs:
        owner, _, attribute = spec.name.rpartition(".")
        inside = any(spec.name.startswith(f"{region}.") for region in regions)
        is_bias = owner in ends and attribute == "bias"
        is_known = is_bias or is_adapter(spec.name) or spec.tp_partial
        if inside and spec.tp_dim is None and not is_known:
            raise _impossible(f"{spec.name} is whole inside a sharded region")
    return {region: root.get_submodule(region) for region in sorted(regions)}


def with_partial_gradients(layout: ModelLayout, regions: Mapping[str, nn.Module]) -> ModelLayout:
    """Return the layout with partial gradients of the layers' whole weights, if any `regions`."""
    specs = tuple(
        replace(spec, tp_partial=True)
        if regions and spec.layer is not None and spec.tp_dim is None
        else spec
        for spec in layout.specs
    )
    return replace(layout, specs=specs)


def _parent(item: ShardedModule) -> str:
    return layer_of(item.name).rpartition(".")[0]


def _impossible(reason: str) -> ModelError:
    return ModelError(
        f"sequence_parallel=True isn't possible for this model: {reason}. Use "
        "HeteroStrategy(sequence_parallel=False)."
    )
