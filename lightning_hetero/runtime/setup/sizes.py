"""Find the sizes by which the planner predicts times and memory: guess a `ModelSpec` of a module.

Exact are the number of layers, the parameters in the matrices of the largest layer (all layers are
planned as if they were as large), and those of the largest tables outside the layers. The others
are guessed, unless a Hugging Face config tells them:

- hidden size: the most frequent length of the layer's one-dimensional parameters, or of the dims of
  its matrices if there are none,
- vocabulary: rows of the largest matrix outside the layers that has the hidden size as its other
  dim,
- heads: from attributes such as `num_heads` of modules or configs, else hidden size / 64,
- MLP width: such that a layer's matrices have their true size, with 4 · hidden² for attention,
- causal attention.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.model_config import FineTuning
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.exchange.slices import OuterRole, ParameterSpec
from lightning_hetero.runtime.setup.layout import ModelLayout

_HEAD_NAMES = ("num_heads", "num_attention_heads", "n_head")


def infer_model_spec(module: nn.Module, layout: ModelLayout) -> ModelSpec | None:
    """Return the sizes of a module, None if it has no layers or no hidden size is found."""
    found = _find_sizes(module, layout) if layout.layers else None
    return None if found is None else _with_tuning(found, layout)


def _find_sizes(module: nn.Module, layout: ModelLayout) -> ModelSpec | None:
    config = _spec_of_config(module)
    guessed = _spec_of_shapes(module, layout, config)
    if guessed is None or config is None:
        return guessed
    # Families differ in a layer's matrices: sizes from shapes are used if the config's differ.
    if abs(config.matrix_params_per_layer / guessed.matrix_params_per_layer - 1) > 0.01:
        return guessed
    return replace(config, num_layers=layout.num_layers)


def _with_tuning(model: ModelSpec, layout: ModelLayout) -> ModelSpec:
    """Return the sizes with what trains; a layer's are means over all layers."""
    if all(spec.requires_grad for spec in layout.specs):
        return replace(model, tuning=None)
    in_layers = [spec for spec in layout.specs if spec.layer is not None]
    trains = dict.fromkeys(OuterRole, 0)
    for spec in layout.specs:
        for role in spec.roles:
            trains[role] += spec.numel * spec.requires_grad
    packed = [spec.packed for spec in in_layers if spec.packed is not None]
    own = model.num_layers * model.own_params_per_layer
    count = sum(spec.numel for spec in in_layers if spec.requires_grad)
    added = min(count, max(0, sum(spec.num_values for spec in in_layers) - own))
    bits = 8 * sum(item.num_bytes for item in packed) / max(1, sum(i.num_values for i in packed))
    tuning = FineTuning(
        layer_params=count // model.num_layers,
        added_params=added // model.num_layers,
        embedding_params=trains[OuterRole.FIRST],
        head_params=trains[OuterRole.LAST],
        stored_bits=bits or None,
        method=f"matrices of {bits:.3g} bits" if bits else "frozen weights",
    )
    return replace(model, tuning=tuning)


def _spec_of_config(module: nn.Module) -> ModelSpec | None:
    for item in module.modules():
        to_dict = getattr(getattr(item, "config", None), "to_dict", None)
        if not callable(to_dict):
            continue
        values = to_dict()
        if isinstance(values, Mapping):
            try:
                return ModelSpec.from_config(values, name=type(item).__name__)
            except ModelError:
                continue
    return None


def _spec_of_shapes(
    module: nn.Module, layout: ModelLayout, config: ModelSpec | None
) -> ModelSpec | None:
    layer = _largest_layer(layout)
    outer = [spec for spec in layout.specs if spec.layer is None]
    hidden = _hidden_size(layer)
    if hidden is None:
        return None
    heads = _num_heads(module, hidden, config)
    # Beside frozen matrices, those that train are adapters.
    frozen = [spec for spec in layer if not spec.requires_grad and len(spec.shape) >= 2]
    members = frozen or [spec for spec in layer if len(spec.shape) >= 2]
    matrices = sum(spec.num_values for spec in members)
    # Without a gate and with full heads: 4 · hidden² + 2 · hidden · inner matrix parameters.
    inner = max(1, round((matrices - 4 * hidden * hidden) / (2 * hidden)))
    tables = [spec for spec in outer if len(spec.shape) == 2 and hidden in spec.shape]
    vocab = max((spec.numel // hidden for spec in tables), default=1)
    tied = any(len(layout.slots[spec.name]) > 1 for spec in tables)
    return ModelSpec(
        name=type(module).__name__,
        num_layers=layout.num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        intermediate_size=inner,
        vocab_size=vocab,
        gated_mlp=False,
        tied_embeddings=tied,
        causal=config.causal if config is not None else True,
    )


def _largest_layer(layout: ModelLayout) -> list[ParameterSpec]:
    """Return the parameters of the layer with the most elements."""
    layers: dict[int, list[ParameterSpec]] = {}
    for spec in layout.specs:
        if spec.layer is not None:
            layers.setdefault(spec.layer, []).append(spec)
    return max(
        layers.values(), key=lambda specs: sum(spec.num_values for spec in specs), default=[]
    )


def _hidden_size(layer: list[ParameterSpec]) -> int | None:
    vectors = Counter(spec.shape[0] for spec in layer if len(spec.shape) == 1)
    extents = Counter(extent for spec in layer if len(spec.shape) >= 2 for extent in spec.shape)
    for found in (vectors, extents):
        if found:
            most = max(found.values())
            return min(extent for extent, count in found.items() if count == most)
    return None


def _num_heads(module: nn.Module, hidden: int, config: ModelSpec | None) -> int:
    candidates: list[Any] = [] if config is None else [config.num_heads]
    for item in module.modules():
        for source in (item, getattr(item, "config", None)):
            candidates += [getattr(source, name, None) for name in _HEAD_NAMES]
    candidates.append(hidden // 64)
    return next((n for n in candidates if isinstance(n, int) and n > 0 and hidden % n == 0), 1)
