"""Measure how fast this device computes a model, and how much memory that takes: make a `Profile`.

As in AutoHet §III-D, blocks of 1, 2, 4, 8, ... layers are timed for several micro-batches and TP
degrees, forward and backward separately, and so are the embedding, the head and an optimizer's
step; the memory of one layer is counted. The layers are those of the reference model
(`models.HeteroLM`) in the user's sizes, with a gated MLP of as many parameters if theirs has no
gate. One rank measures its device type alone, without a tensor-parallel group: `ModelShard` has
what one rank of a group computes, and the cost model adds the group's traffic for the links of the
cluster.
"""

import datetime
import fnmatch
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.process import installed_version
from lightning_hetero.core.profile import BlockTimes, DeviceProfile, LayerMemory, Profile
from lightning_hetero.models import HeteroLM, LMConfig, packed_cross_entropy
from lightning_hetero.runtime.setup.products import SavedBytes, bytes_of_products


class ModelShard:
    """The reference model with a few layers, cut to what one rank of a TP group computes.

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
    sizes = ("heads", model.num_heads), ("intermediate_size", model.intermediate_size)
    for what, size in sizes:
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


_Timed = Callable[[], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """The measurements to take."""

    microbatches: tuple[tuple[int, ...], ...]
    """Micro-batches, each as the lengths of its sequences in tokens; several improve the fit."""
    tp_degrees: tuple[int, ...] = (1,)
    """TP degrees whose shards are measured; each must divide heads, key-value heads and widths."""
    max_block: int = 8
    """Largest block of layers; blocks are the powers of two up to it and to the model's layers."""
    num_repeats: int = 5
    """Measurements whose median is taken, after one to warm up."""

    def __post_init__(self) -> None:
        numbers = (*self.tp_degrees, self.max_block, self.num_repeats)
        lengths = [length for batch in self.microbatches for length in batch]
        if not self.tp_degrees or not all(self.microbatches) or min(*numbers, *lengths, 1) < 1:
            raise ProfileError(
                f"Can't measure samples of {lengths} tokens, TP degrees {list(self.tp_degrees)}, "
                f"blocks up to {self.max_block} and {self.num_repeats} "
                "repeats: all must be 1 or more."
            )
        if not self.microbatches:
            raise ProfileError("No micro-batch is given to measure. Give at least one length.")


def current_versions() -> dict[str, str]:
    """Return the versions that make a profile stale when they change."""
    return {
        "torch": torch.__version__,
        "lightning-hetero": installed_version("lightning-hetero"),
    }


def measure_profile(
    model: ModelSpec,
    options: ProfileOptions,
    *,
    device_name: str,
    device: torch.device,
    report: Callable[[str], None] | None = None,
) -> Profile:
    """Measure the model's layers on one device; call it on one rank of each device type.

    Args:
        model: Sizes of the model.
        options: What is measured.
        device_name: Name of the device type, as cluster files use it.
        device: Where to measure; bf16 on CUDA, fp32 elsewhere.
        report: Called with a line of text before each measurement.
    """
    say = report or (lambda _: None)
    times, memory = [], []
    for tp_degree in options.tp_degrees:
        largest = min(options.max_block, model.num_layers)
        largest = 1 << (largest.bit_length() - 1)
        shard = ModelShard(model, tp_degree, largest, device)
        for lengths in options.microbatches:
            say(f"TP {tp_degree}, micro-batch {list(lengths)}")
            times.append(_measure_times(shard, lengths, options))
        say(f"TP {tp_degree}, memory")
        memory.append(_measure_memory(shard, options.microbatches))
    say("optimizer step")
    return Profile(
        model=model,
        devices=(
            DeviceProfile(
                device=device_name,
                times=tuple(times),
                memory=tuple(memory),
                step_s_per_param=_measure_step(shard, options.num_repeats),
                includes_tp_traffic=False,
            ),
        ),
        versions=current_versions(),
        date=datetime.datetime.now(datetime.UTC),
    )


def _measure_times(
    shard: ModelShard, lengths: tuple[int, ...], options: ProfileOptions
) -> BlockTimes:
    token_ids, extra = shard.batch(lengths)
    hidden = shard.hidden(len(token_ids))

    def block(size: int) -> tuple[float, float]:
        return _forward_backward_s(lambda: shard.run_block(hidden, size, extra), shard.device)

    def embedding() -> tuple[float, float]:
        return _forward_backward_s(lambda: shard.model.embed_tokens(token_ids), shard.device)

    def head() -> tuple[float, float]:
        return _forward_backward_s(lambda: shard.run_head(hidden, token_ids), shard.device)

    blocks: dict[int, tuple[float, float]] = {}
    size = 1
    while size <= len(shard.model.layers):
        try:
            blocks[size] = _median(lambda: block(size), options.num_repeats)  # noqa: B023
        except torch.OutOfMemoryError:
            break
        size *= 2
    if not blocks:
        raise ProfileError(
            f"Not even one layer runs {sum(lengths)} tokens on {shard.device} at TP "
            f"{shard.tp_degree}: out of memory. Give shorter micro-batches."
        )
    return BlockTimes(
        tp_degree=shard.tp_degree,
        lengths=lengths,
        blocks=blocks,
        embedding=_median(embedding, options.num_repeats),
        head=_median(head, options.num_repeats),
    )


def _measure_memory(shard: ModelShard, microbatches: Sequence[tuple[int, ...]]) -> LayerMemory:
    """Return the bytes per token that autograd keeps: exact, and the same on every device type.

    The maximum over the micro-batches counts: attention may keep more if samples differ in length.
    """
    found = [_count_memory(shard, lengths) for lengths in microbatches]
    layer, head, embedding, recomputed, products = map(max, zip(*found, strict=True))
    return LayerMemory(
        tp_degree=shard.tp_degree,
        layer_bytes_per_token=layer,
        head_bytes_per_token=head,
        embedding_bytes_per_token=embedding,
        recomputed_bytes_per_token=recomputed,
        products_bytes_per_token=products,
    )


def _count_memory(shard: ModelShard, lengths: tuple[int, ...]) -> tuple[float, ...]:
    """Return the bytes per token that autograd keeps of a layer, the head and the embedding.

    Then of a layer that is recomputed as a whole, and of what its products return.
    """
    token_ids, extra = shard.batch(lengths)
    hidden = shard.hidden(len(token_ids))
    shared = (*shard.model.parameters(), *(item for item in extra if isinstance(item, Tensor)))

    def layer() -> Tensor:
        return shard.run_block(hidden, 1, extra)

    def kept_bytes(run: Callable[[], Tensor]) -> float:
        with SavedBytes(without=shared) as saved:
            output = run()
        del output
        return saved.total / len(token_ids)

    return (
        kept_bytes(layer),
        kept_bytes(lambda: shard.run_head(hidden, token_ids)),
        kept_bytes(lambda: shard.model.embed_tokens(token_ids)),
        kept_bytes(lambda: checkpoint(shard.run_block, hidden, 1, extra, use_reentrant=False)),
        bytes_of_products(layer) / len(token_ids),
    )


def _measure_step(shard: ModelShard, num_repeats: int) -> float:
    """Return the seconds per parameter of AdamW on fp32 master weights of one layer."""
    masters = [
        parameter.detach().float().clone().requires_grad_()
        for parameter in shard.model.layers[0].parameters()
    ]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters)

    def step() -> tuple[float, float]:
        start = _now_s(shard.device)
        optimizer.step()
        return _now_s(shard.device) - start, 0.0

    count = sum(master.numel() for master in masters)
    return _median(step, num_repeats)[0] / count


def _forward_backward_s(run: Callable[[], Tensor], device: torch.device) -> tuple[float, float]:
    start = _now_s(device)
    output = run()
    middle = _now_s(device)
    if not output.requires_grad:
        return middle - start, 0.0
    torch.autograd.backward(output, torch.ones_like(output))
    return middle - start, _now_s(device) - middle


def _median(measure: _Timed, num_repeats: int) -> tuple[float, float]:
    measure()  # Warms up caches, allocator and kernels.
    pairs = [measure() for _ in range(num_repeats)]
    forward, backward = (statistics.median(column) for column in zip(*pairs, strict=True))
    return forward, backward


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif torch.get_num_threads() == 1:
        # One thread's own time: other processes of the host don't count.
        return time.thread_time()
    return time.perf_counter()
