"""A QLoRA step over three unequal cards, against what people do without a plan for them.

The cards are emulated at 1 : 1 : 2: whatever a rank computes is stretched by sleeping. Ours is one
pipeline of 2, 2 and 4 layers in 8 micro-batches. `device_map` fills the cards in turn with equal
numbers of layers, as for cards of equal memory, and runs the whole batch through one card after the
other; here it is one process of plain Lightning whose layers are stretched. Two equal stages are on
the fast card and a slow one.

Floors, if nothing but layers took time, in times of the whole batch on a slow card: ours 1/4 · 10/8
= 0.31; `device_map` with 3, 3 and 2 layers 3/8 + 3/8 + 1/8 = 0.88, 2.8 times ours; two equal stages
1/2 · 9/8 = 0.56, 1.8 times ours.

Bytes are counted in the same run: what a rank pulls and pushes, what all own with Adam's states,
and the files of a layer-wise checkpoint, each over what adapters alone would take.
"""

import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, LayerwiseCheckpoint, ParallelPlan
from lightning_hetero.testing import EmulatedDevices
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import StepTimes, in_turns, processes
from tests.exchange.message_lists import pulls_of, pushes_of
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.peft_runs import quantize
from tests.toy import quiet

SLOWDOWNS = (4.0, 4.0, 2.0)
NUM_LAYERS = 8
ROWS, LENGTH, VOCABULARY = 16, 256, 256
NUM_ITERATIONS = 5
REPEATS = 2
UNEQUAL = plan_of(pipeline(stage(0, 0, 2), stage(1, 2, 4), stage(2, 4, 8), num_microbatches=8))
TWO_EQUAL = plan_of(pipeline(stage(0, 0, 4), stage(1, 4, 8), num_microbatches=8))
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class QLoRA(L.LightningModule):
    """A llama whose layers are NF4, with LoRA beside every matrix of theirs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
        )
        base = AutoModelForCausalLM.from_config(config)
        quantize(base.model.layers, "nf4")
        self.layers = list(base.model.layers)
        base.enable_input_require_grads()
        self.model = get_peft_model(base, LoraConfig(r=rank, target_modules=TARGETS))

    def training_step(self, batch: Tensor) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class OneCardAfterTheOther(L.Callback):
    """Stretches each layer's forward and backward as the card does on which it lies."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for index, layer in enumerate(pl_module.layers):
            self._stretch(layer, SLOWDOWNS[index * len(SLOWDOWNS) // NUM_LAYERS])

    def _stretch(self, layer: nn.Module, slowdown: float) -> None:
        began: list[float] = []

        def begin(*_: Any) -> None:
            began[:] = time.perf_counter(), time.thread_time()

        def end(*_: Any) -> None:
            wall_s, cpu_s = time.perf_counter() - began[0], time.thread_time() - began[1]
            time.sleep(max(0.0, cpu_s * slowdown - wall_s))

        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
        layer.register_full_backward_pre_hook(begin)
        layer.register_full_backward_hook(end)


def fit(
    plan: Any, slowdowns: tuple[float, ...], *callbacks: L.Callback, lora_rank: int = 16
) -> list[float]:
    """Train as one rank, by plain Lightning without a plan; return the seconds of iterations."""
    times = StepTimes()
    options: dict[str, Any] = {"devices": len(slowdowns), "callbacks": [times, *callbacks]}
    if plan is not None:
        options["strategy"] = HeteroStrategy(ParallelPlan.from_dict(plan))
        options["callbacks"] += [EmulatedDevices(slowdowns)]
    ids = torch.randint(VOCABULARY, (ROWS * NUM_ITERATIONS, LENGTH))
    saves = any(isinstance(item, LayerwiseCheckpoint) for item in callbacks)
    options |= {"max_steps": NUM_ITERATIONS, "enable_checkpointing": saves}
    L.Trainer(**quiet(**options)).fit(QLoRA(lora_rank), DataLoader(ids, batch_size=ROWS))
    return times.seconds


def step_s(rank: int, plan: Any, slowdowns: tuple[float, ...]) -> float:
    """Return the median seconds of an iteration."""
    by_layers = () if plan is not None else (OneCardAfterTheOther(),)
    return statistics.median(fit(plan, slowdowns, *by_layers))


class Count(L.Callback):
    """Counts the bytes that this rank owns, that it moves in an iteration, and of all adapters."""

    found: dict[str, int]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        table, rank, store = engine.plans.running.table, trainer.global_rank, engine.store
        states = trainer.optimizers[0].state.values()
        moments = [item for state in states for item in state.values() if torch.is_tensor(item)]
        moves = (*pulls_of(table, rank), *pushes_of(table, rank))
        arriving = [move.numel for move in moves if move.source != rank == move.destination]
        self.found = {
            "owned": sum(item.nbytes for item in (*store.masters.values(), *moments)),
            "moved": 4 * sum(arriving),
            "adapters": 4 * sum(s.numel for s in store.specs.values() if s.requires_grad),
        }


def count(rank: int, plan: Any, folder: str) -> dict[str, int]:
    """Return what a rank counts in a run of two copies that saves once."""
    counted, saving = Count(), LayerwiseCheckpoint(folder, every_n_train_steps=NUM_ITERATIONS)
    fit(plan, (1.0, 1.0, 1.0), counted, saving, lora_rank=64)
    return counted.found


def byte_rows(pool: ProcessPool) -> list[Row]:
    """Return rows of bytes; three ranks have two copies of the model, so that adapters travel."""
    copies = plan_of(
        pipeline(stage(0, 0, 3), stage(1, 3, 8), num_microbatches=4),
        pipeline(stage(2, 0, 8), num_microbatches=4),
    )
    with tempfile.TemporaryDirectory() as folder:
        found = pool.run(count, 3, copies, folder)
        stored = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    adapters = found[0]["adapters"]
    counted = {
        # Each of two copies receives the half of the weights, and of the gradients, that it lacks.
        "pulled and pushed by all ranks in an iteration": (sum(item["moved"] for item in found), 2),
        "owned by all ranks, with Adam's states": (sum(item["owned"] for item in found), 3),
        "in a layer-wise checkpoint, with Adam's states": (stored, 3),
    }
    return [
        Row(
            name=f"QLoRA: bytes {what}",
            ours=size / 2**20,
            peer=adapters * times / 2**20,
            unit="MiB",
            target=1.05,
            note=f"LoRA of rank 64: {adapters / 2**20:.3g} MiB of adapters, {times} times",
        )
        for what, (size, times) in counted.items()
    ]


def run() -> list[Row]:
    ways = {
        "ours": (UNEQUAL, SLOWDOWNS),
        "one card after the other (device_map)": (None, SLOWDOWNS[:1]),
        "two equal stages, on a fast and a slow one": (TWO_EQUAL, SLOWDOWNS[1:]),
    }
    with processes() as pool:
        timed = {
            name: partial(pool.run, step_s, len(slowdowns), plan, slowdowns)
            for name, (plan, slowdowns) in ways.items()
        }
        times = in_turns(timed, REPEATS)
        rows = byte_rows(pool)
    ours, *peers = (statistics.median(ranks[0] for ranks in runs) for runs in times.values())
    return [
        Row(
            name=f"QLoRA step, 3 emulated cards of speed 1:1:2, against {what}",
            ours=ours,
            peer=peer,
            target=target,
            better="higher",
            note="2, 2 and 4 layers, 8 micro-batches; NF4, LoRA of rank 16",
        )
        for what, peer, target in zip([*ways][1:], peers, (1.8, 1.3), strict=True)
    ] + rows
