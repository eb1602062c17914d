"""Cut a few layers of the reference model to what one rank of a tensor-parallel group computes.

They are measured on one device, so there is no group: each sharded module becomes a smaller one.
A model without a gate in its MLP gets a gated one of as many parameters.
"""

import fnmatch
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.models import HeteroLM, LMConfig, packed_cross_entropy

__all__ = ["ModelShard"]


class ModelShard:
    """The reference model with a few layers, cut to what one rank of a TP group computes.

    Args:
        model: Sizes of the model.
        tp_degree: Ranks of the group.
        num_layers: Number of layers.
        device: The device; bf16 on CUDA, fp32 elsewhere.

    Raises:
        ProfileError: The degree doesn't divide the model, or no reference layer has its sizes.
    """

    def __init__(
        self, model: ModelSpec, tp_degree: int, num_layers: int, device: torch.device
    ) -> None:
        self.tp_degree = tp_degree
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.vocab_size = model.vocab_size // tp_degree
        _check_degree(model, tp_degree)
        whole = HeteroLM(_config(model, tp_degree, num_layers)).to(device, self.dtype)
        _cut(whole, tp_degree)
        # Only gradients of activations are measured where weights are frozen.
        self.model = whole.requires_grad_(model.tuning is None)

    def batch(self, lengths: Sequence[int]) -> tuple[Tensor, tuple[object, ...]]:
        """Return random token ids, (tokens,), and the layers' arguments besides the activation."""
        starts = [sum(lengths[:index]) for index in range(len(lengths) + 1)]
        positions = torch.cat([torch.arange(length) for length in lengths]).to(self.device)
        token_ids = torch.randint(self.vocab_size, (starts[-1],), device=self.device)
        captured: list[tuple[object, ...]] = []
        handle = self.model.layers[0].register_forward_pre_hook(
            lambda _, arguments: captured.append(arguments[1:])
        )
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=self.device)
        with torch.no_grad(), handle:
            self.model(token_ids, cu_seqlens, positions, max(lengths))
        return token_ids, captured[0]

    def hidden(self, num_tokens: int) -> Tensor:
        """Return a random activation, (tokens, hidden size), that requires a gradient."""
        width = self.model.config.hidden_size
        state = torch.randn(num_tokens, width, device=self.device, dtype=self.dtype)
        return state.requires_grad_()

    def run_block(self, hidden: Tensor, num_layers: int, extra: tuple[object, ...]) -> Tensor:
        """Run the first layers forward."""
        for layer in self.model.layers[:num_layers]:
            hidden = layer(hidden, *extra)
        return hidden

    def run_head(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Run final norm, head and loss."""
        return packed_cross_entropy(self.model.lm_head(self.model.norm(hidden)), labels)


def _check_degree(model: ModelSpec, tp_degree: int) -> None:
    sizes = {
        "heads": model.num_heads,
        "intermediate_size": model.intermediate_size,
    }
    for what, size in sizes.items():
        if size % tp_degree:
            raise ProfileError(
                f"TP degree {tp_degree} doesn't divide the {size} {what} of {model.name}. Choose "
                "degrees that do."
            )
    if model.query_size != model.hidden_size:
        raise ProfileError(
            f"{model.name} has heads of {model.query_size} together but hidden_size "
            f"{model.hidden_size}; the reference layers need both equal. Use the roofline."
        )


def _config(model: ModelSpec, tp_degree: int, num_layers: int) -> LMConfig:
    # Where ranks share key heads, each has as many as divide its query heads.
    query_heads, least = model.num_heads // tp_degree, -(-model.num_kv_heads // tp_degree)
    key_heads = next(n for n in range(least, query_heads + 1) if query_heads % n == 0)
    inner = model.intermediate_size if model.gated_mlp else model.intermediate_size * 2 // 3
    return LMConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=num_layers,
        num_heads=model.num_heads,
        num_kv_heads=key_heads * tp_degree,
        intermediate_size=inner,
    )


def _cut(model: HeteroLM, tp_degree: int) -> None:
    """Replace every module that the TP plan cuts by its share for one rank."""
    if tp_degree == 1:
        return
    for name, module in list(model.named_modules()):
        kinds = (
            kind
            for pattern, kind in model.tp_plan.items()
            if fnmatch.fnmatchcase(f"{name}.weight", pattern)
        )
        kind = next(kinds, None)
        if kind is None:
            continue
        parent, _, child = name.rpartition(".")
        weight = module.get_parameter("weight")
        dim = 1 if kind == "rowwise" else 0
        share = weight.detach().narrow(dim, 0, weight.shape[dim] // tp_degree).clone()
        replacement: nn.Module
        if isinstance(module, nn.Embedding):
            replacement = nn.Embedding(share.shape[0], share.shape[1], _weight=share)
        else:
            replacement = nn.Linear(share.shape[1], share.shape[0], bias=False, device="meta")
            replacement.weight = nn.Parameter(share)
        setattr(model.get_submodule(parent), child, replacement)
