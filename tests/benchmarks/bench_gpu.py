"""One CUDA device, about 1B parameters, packed lengths: what the strategy costs, and the MFU.

`HeteroStrategy` on one rank runs the same kernels as Lightning's single device; what it adds is
host work (seeds, swapping parameters, agreeing) and one pass over the gradients that divides them
by the target tokens. Floor in bf16: 4 bytes a parameter for that pass, 1 ms of a step of about
300 ms on an H100. `bench_packing` compares packed with padded batches.

MFU counts `ModelSpec.step_flops` of the real tokens, no recomputation, against the dense bf16 peak
of `core.devices`. Lengths are drawn from a lognormal with the median and spread of web documents.
"""

import statistics
import time
from itertools import product
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy
from lightning_hetero.models import LMConfig, pack_samples
from lightning_hetero.runtime.setup.detect import describe_device
from tests.benchmarks.harness import Row
from tests.packed import PackedLM
from tests.toy import quiet

CONFIG = LMConfig(
    vocab_size=32_000,
    hidden_size=2_048,
    num_layers=16,
    num_heads=16,
    num_kv_heads=8,
    intermediate_size=8_192,
)
TOKENS, LONGEST = 16_384, 4_096
"""Of a packed batch, and of a sample, at most."""
NUM_WARM_UP, NUM_STEPS, REPEATS = 6, 14, 3


def make_batches() -> list[list[Tensor]]:
    """Return batches of samples, each filled up to the number of tokens."""
    draw, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    batches: list[list[Tensor]] = [[]]
    room = TOKENS
    while True:
        length = int(np.clip(draw.lognormal(mean=6.3, sigma=1.1), 2, LONGEST))
        if length > room:
            if len(batches) == NUM_WARM_UP + NUM_STEPS:
                return batches
            batches.append([])
            room = TOKENS
        batches[-1].append(torch.randint(CONFIG.vocab_size, (length,), generator=generator))
        room -= length


class Reference(PackedLM):
    """The reference model, of which nothing is read from the device in a step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class Stopwatch(L.Callback):
    """When the warm-up and the last step ended, the device's work done."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step in (NUM_WARM_UP, NUM_WARM_UP + NUM_STEPS):
            torch.cuda.synchronize()
            self.ends_s.append(time.perf_counter())


def train_s(batches: list[list[Tensor]], precision: Any, *, compiled: bool, hetero: bool) -> float:
    """Return the seconds of the timed steps."""
    torch.manual_seed(0)
    module, stopwatch = Reference(CONFIG), Stopwatch()
    options = quiet(accelerator="cuda", devices=1, precision=precision, callbacks=[stopwatch])
    if hetero:
        how = {"num_stages": 1, "num_microbatches": 1, "compile_layers": compiled}
        options["strategy"] = HeteroStrategy(**how)
    elif compiled:
        for layer in module.model.layers:
            layer.compile()
    loader = DataLoader(batches, batch_size=1, collate_fn=lambda items: pack_samples(items[0]))
    L.Trainer(**options, max_steps=NUM_WARM_UP + NUM_STEPS).fit(module, loader)
    del module
    torch.cuda.empty_cache()
    start_s, end_s = stopwatch.ends_s
    return end_s - start_s


def run() -> list[Row]:
    """Measure on the first CUDA device; none, with the reason printed, if there is none."""
    if not torch.cuda.is_available():
        print("gpu: skipped, there is no CUDA device")
        return []
    device = describe_device(torch.device("cuda", 0))
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"gpu: {device.name} of {device.peak_flops_per_s / 1e12:.0f} TFLOP/s, {versions}")
    batches, rows = make_batches(), []
    lengths = [len(sample) for batch in batches[NUM_WARM_UP:] for sample in batch]
    flops, higher = CONFIG.spec.step_flops(lengths), {"better": "higher"}
    for precision, compiled in product(("bf16-true", "bf16-mixed"), (False, True)):
        how: dict[str, Any] = {"precision": precision, "compiled": compiled}
        times = [
            (train_s(batches, **how, hetero=True), train_s(batches, **how, hetero=False))
            for _ in range(REPEATS)
        ]
        ours, peer = (statistics.median(column) for column in zip(*times, strict=True))
        name = f"{precision}{', compiled layers' if compiled else ''}"
        speeds: dict[str, Any] = {"ours": sum(lengths) / ours, "peer": sum(lengths) / peer}
        note = "peer: Lightning's single device"
        rows.append(
            Row(name=f"1B, {name}", unit="tokens/s", target=0.98, note=note, **speeds, **higher)
        )
        shares = [flops / seconds / device.peak_flops_per_s for seconds in (ours, peer)]
        mfu: dict[str, Any] = {"ours": shares[0], "peer": shares[1], "value": shares[0]}
        note = "of the dense bf16 peak; peer: single device"
        rows.append(Row(name=f"MFU, {name}", unit="", target=0.5, note=note, **mfu, **higher))
    return rows
