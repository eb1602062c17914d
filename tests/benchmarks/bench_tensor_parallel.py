"""Step time on two tensor-parallel ranks beside Lightning's ModelParallelStrategy.

Both train the reference model on the same packed batches with AdamW, two processes each, one thread
a process. Floor, per layer and direction: two all-reduces of the hidden state (behind attention and
MLP forward, before them backward), and one each for embedding and head. The peer's DTensor modules
sum input gradients once for each projection: five all-reduces a layer backward instead of two.
"""

import statistics
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn, optim
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.models import LMConfig
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import StepTimes, in_turns, processes
from tests.packed import PackedLM, Samples
from tests.toy import quiet

CONFIG = LMConfig(vocab_size=2048, hidden_size=256, num_layers=4, num_heads=8, num_kv_heads=4)
LENGTHS = (400, 112, 300, 212)
NUM_STEPS = 9
NUM_WARM_UP = 3
NUM_REPEATS = 3


class LanguageModule(PackedLM):
    """The reference model with as many equal batches as there are steps."""

    def __init__(self) -> None:
        super().__init__(CONFIG)

    def configure_optimizers(self) -> optim.Optimizer:
        # Two groups, since one can't hold DTensors and plain tensors.
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        return optim.AdamW([{"params": matrices}, {"params": vectors}], lr=1e-3)

    def train_dataloader(self) -> Any:
        return Samples(LENGTHS * NUM_STEPS, CONFIG.vocab_size).packed(len(LENGTHS))


class DTensorModule(LanguageModule):
    """The same with torch's own tensor parallelism."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        plan: dict[str, Any] = {
            "embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Replicate()),
        }
        for name, module in self.model.named_modules():
            if not name.startswith("layers.") or not isinstance(module, nn.Linear):
                continue
            ends = name.endswith(("o_proj", "down_proj"))
            plan[name] = RowwiseParallel() if ends else ColwiseParallel()
        parallelize_module(self.model, mesh, plan)


def fit(rank: int, kind: str) -> tuple[float, list[float]]:
    """Return the median step time and the losses of one run."""
    L.seed_everything(1, verbose=False)
    module: LanguageModule
    strategy: Any
    if kind == "peer":
        module = DTensorModule()
        strategy = ModelParallelStrategy(
            data_parallel_size=1,
            tensor_parallel_size=2,
            save_distributed_checkpoint=False,
            process_group_backend="gloo",
        )
    else:
        module = LanguageModule()
        plan = ParallelPlan.even(world_size=2, num_layers=CONFIG.num_layers, tp_degree=2)
        strategy = HeteroStrategy(plan)
    times = StepTimes(NUM_WARM_UP)
    options = quiet(max_epochs=1, devices=2, callbacks=[times])
    L.Trainer(**options, strategy=strategy, use_distributed_sampler=False).fit(module)
    return statistics.median(times.seconds), module.losses


def run() -> list[Row]:
    """Time both strategies, their repeats interleaved."""
    with processes() as pool:
        ways = {kind: partial(pool.run, fit, 2, kind) for kind in ("ours", "peer")}
        runs = in_turns(ways, NUM_REPEATS)
    medians = {
        kind: statistics.median(max(step_s for step_s, _ in ranks) for ranks in found)
        for kind, found in runs.items()
    }
    losses = {kind: found[-1][0][1] for kind, found in runs.items()}
    differences = [abs(a - b) for a, b in zip(losses["ours"], losses["peer"], strict=True)]
    size = f"{sum(LENGTHS)} tokens, {CONFIG.num_layers} layers of {CONFIG.hidden_size}"
    return [
        Row(
            name=f"step on 2 tensor-parallel ranks, {size}",
            ours=medians["ours"],
            peer=medians["peer"],
            target=1.05,
            note=f"ModelParallelStrategy; losses differ by {max(differences):.1e} at most",
        )
    ]
