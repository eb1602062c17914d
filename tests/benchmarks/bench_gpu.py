"""One CUDA device, about 1B parameters, packed lengths: what the strategy costs, and the MFU.

`HeteroStrategy` on one rank runs the same kernels as Lightning's single device; what it adds is
host work (seeds, swapping parameters, agreeing) and one pass over the gradients that divides them
by the target tokens. Floor in bf16: 4 bytes a parameter for that pass, 1 ms of a step of about
300 ms on an H100. `bench_packing` compares packed with padded batches.

MFU counts `ModelSpec.step_flops` of the real tokens, no recomputation, against the dense bf16 peak
of `core.devices`. Lengths come from ../shared/data/lengths beside the checkout if they are there,
else they are drawn from a lognormal of the same median and spread. `python -m tests.benchmarks gpu`
prints hardware and versions for the README.
"""

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
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

LENGTHS_FILE = Path(__file__).resolve().parents[2].parent / "shared/data/lengths/web-documents.npy"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, and how long."""

    config: LMConfig
    accelerator: str = "cuda"
    precision: str = "bf16-true"
    compiled: bool = False
    tokens: int = 16_384
    """Of a packed batch, at most."""
    max_length: int = 4_096
    num_warmup_steps: int = 6
    num_steps: int = 14
    repeats: int = 3


ONE_BILLION = Setting(
    config=LMConfig(
        vocab_size=32_000,
        hidden_size=2_048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=8_192,
    )
)


def draw_lengths(count: int, max_length: int) -> list[int]:
    """Return lengths of documents, clipped."""
    generator = np.random.default_rng(0)
    if LENGTHS_FILE.exists():
        lengths = generator.choice(np.load(LENGTHS_FILE), count)
    else:
        lengths = generator.lognormal(mean=6.3, sigma=1.1, size=count).astype(int)
    return [int(length) for length in np.clip(lengths, 2, max_length)]


def make_batches(setting: Setting, count: int) -> list[list[Tensor]]:
    """Return batches of samples, each filled up to the number of tokens."""
    generator = torch.Generator().manual_seed(0)
    batches: list[list[Tensor]] = [[]]
    room = setting.tokens
    for length in draw_lengths(count * setting.tokens // 2, setting.max_length):
        if length > room:
            if len(batches) == count:
                break
            batches.append([])
            room = setting.tokens
        batches[-1].append(torch.randint(setting.config.vocab_size, (length,), generator=generator))
        room -= length
    return batches


class Reference(PackedLM):
    """The reference model, of which nothing is read from the device in a step."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.device.type == "cuda")


class Stopwatch(L.Callback):
    """Seconds from the end of the warm-up to the end of the last step, the device's work done."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self._setting.num_warmup_steps:
            self._start = self._now()
        if trainer.global_step == self._setting.num_steps + self._setting.num_warmup_steps:
            self.seconds = self._now() - self._start

    def _now(self) -> float:
        if self._setting.accelerator == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train_s(setting: Setting, batches: list[list[Tensor]], *, hetero: bool) -> float:
    """Return the seconds of the timed steps."""
    torch.manual_seed(0)
    module = Reference(setting.config)
    options: dict[str, Any] = {}
    if hetero:
        options["strategy"] = HeteroStrategy(
            num_stages=1, num_microbatches=1, compile_layers=setting.compiled
        )
    elif setting.compiled:
        for layer in module.model.layers:
            layer.compile()
    stopwatch = Stopwatch(setting)
    options |= {"accelerator": setting.accelerator, "precision": setting.precision}
    trainer = L.Trainer(
        **quiet(**options),
        devices=1,
        max_steps=setting.num_warmup_steps + setting.num_steps,
        callbacks=[stopwatch],
    )
    loader = DataLoader(batches, batch_size=1, collate_fn=lambda items: pack_samples(items[0]))
    trainer.fit(module, loader)
    if setting.accelerator == "cuda":
        del module, trainer
        torch.cuda.empty_cache()
    return stopwatch.seconds


def compare(setting: Setting) -> tuple[float, float, float, float]:
    """Return (seconds, seconds of the single device, real tokens, FLOPs) of the timed steps."""
    batches = make_batches(setting, setting.num_warmup_steps + setting.num_steps)
    lengths = [len(sample) for batch in batches[setting.num_warmup_steps :] for sample in batch]
    ours: list[float] = []
    peer: list[float] = []
    for _ in range(setting.repeats):
        ours.append(train_s(setting, batches, hetero=True))
        peer.append(train_s(setting, batches, hetero=False))
    flops = setting.config.spec.step_flops(lengths)
    return statistics.median(ours), statistics.median(peer), sum(lengths), flops


def measure(setting: Setting, peak_flops_per_s: float) -> list[Row]:
    """Compare with the single device, without and with compilation."""
    rows = []
    spec = setting.config.spec
    matrices = spec.num_layers * spec.matrix_params_per_layer + spec.hidden_size * spec.vocab_size
    billions = matrices / 1e9
    for precision in ("bf16-true", "bf16-mixed"):
        for compiled in (False, True):
            case = replace(setting, precision=precision, compiled=compiled)
            ours_s, peer_s, tokens, flops = compare(case)
            mfu = flops / ours_s / peak_flops_per_s
            how = f"{precision}{', compiled layers' if compiled else ''}"
            rows += [
                Row(
                    name=f"{billions:.2f}B, {how}",
                    ours=tokens / ours_s,
                    peer=tokens / peer_s,
                    unit="tokens/s",
                    target=0.98,
                    better="higher",
                    value=peer_s / ours_s,
                    note="peer: Lightning's single device",
                ),
                Row(
                    name=f"MFU, {how}",
                    ours=mfu,
                    peer=flops / peer_s / peak_flops_per_s,
                    unit="",
                    target=0.5,
                    better="higher",
                    value=mfu,
                    note="of the dense bf16 peak; peer: single device",
                ),
            ]
    return rows


def run() -> list[Row]:
    """Measure on the first CUDA device; none, with the reason printed, if there is none."""
    if not torch.cuda.is_available():
        print("gpu: skipped, there is no CUDA device")
        return []
    device = torch.device("cuda", 0)
    spec = describe_device(device)
    print(
        f"gpu: {torch.cuda.get_device_name(device)} taken as {spec.name} of "
        f"{spec.peak_flops_per_s / 1e12:.0f} TFLOP/s, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, lengths {'of documents' if LENGTHS_FILE.exists() else 'drawn'}"
    )
    return measure(ONE_BILLION, spec.peak_flops_per_s)
