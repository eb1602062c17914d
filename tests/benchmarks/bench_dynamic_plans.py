"""Dynamic plans against the best static plan, for real: four processes that compute at 1 : 1 : 2 : 2.

Both runs train the same iterations of Python's own sources, clipped at 4,096 tokens, 8,192 tokens
an iteration. Where one sample is half of an iteration, a tensor-parallel pair shortens it; where
many share it, single devices waste less. The candidates come from `plan="auto"`, which measures the
model once; the static run has the first of them only. Floor: an iteration can't take less than its
tokens on all devices together, nor less than its longest sample on the fastest pipeline; what the
planner predicts for both runs is in the note. The stall is what the trainer waits before it has an
iteration's plan, as a share of the step.
"""

import os
import statistics
import tempfile
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor

from examples.text_data import VOCAB_SIZE, PythonSourceDataset
from lightning_hetero import AutoPlan, HeteroStrategy
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.models import HeteroLM, LMConfig, PackedBatch, packed_cross_entropy
from lightning_hetero.testing import EmulatedDevices
from tests.benchmarks.harness import Row
from tests.processes import ProcessPool
from tests.toy import quiet

SLOWDOWNS = (8.0, 8.0, 4.0, 4.0)
CONTEXT = 2048
TOKENS_PER_STEP = 4096
NUM_ITERATIONS = 24
WARM_UP = 2
NUM_CANDIDATES = 6
REPEATS = 2
CONFIG = LMConfig(
    vocab_size=VOCAB_SIZE, hidden_size=192, num_layers=3, num_heads=4, intermediate_size=384
)


class PackedText(L.LightningModule):
    """The reference model on packed samples; keeps the seconds and the stall of every step."""

    def __init__(self) -> None:
        super().__init__()
        self.model = HeteroLM(CONFIG)
        self.seconds: list[float] = []
        self.stalls_s: list[float] = []
        self.plans: list[str] = []

    def training_step(self, batch: PackedBatch, batch_idx: int) -> Tensor:
        logits = self.model(batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen)
        return packed_cross_entropy(logits, batch.labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)

    def on_train_start(self) -> None:
        self._last_s = time.perf_counter()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.stalls_s.append(self.trainer.datamodule.planning_stall_s)  # type: ignore[attr-defined]
        self.plans.append(batch.plan.to_json())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        now_s = time.perf_counter()
        self.seconds.append(now_s - self._last_s)
        self._last_s = now_s


def train(rank: int, num_candidate_plans: int, cache: str) -> dict[str, Any]:
    """Train some iterations and return their seconds, stalls and plans."""
    os.environ["LIGHTNING_HETERO_CACHE"] = cache
    torch.manual_seed(1)
    strategy = HeteroStrategy(
        AutoPlan(tp_degrees=(1, 2, 4)), num_candidate_plans=num_candidate_plans
    )
    module = PackedText()
    dataset = PythonSourceDataset("train", context_length=CONTEXT, max_files=100)
    data = HeteroDataModule(
        dataset,
        tokens_per_step=TOKENS_PER_STEP,
        context_length=CONTEXT,
        lengths=[len(sample) for sample in dataset.samples],
    )
    trainer = L.Trainer(
        **quiet(
            devices=len(SLOWDOWNS),
            strategy=strategy,
            max_steps=NUM_ITERATIONS,
            callbacks=[EmulatedDevices(SLOWDOWNS)],
        )
    )
    trainer.fit(module, datamodule=data)
    assert strategy.auto_planned is not None
    found = strategy.auto_planned.candidates
    assert found is not None
    return {
        "seconds": module.seconds[WARM_UP:],
        "stalls_s": module.stalls_s[WARM_UP:],
        "plans": module.plans[WARM_UP:],
        "predicted_s": (found.static_s, found.dynamic_s),
        "candidates": [str(plan) for plan in found.plans],
    }


def run() -> list[Row]:
    """Time both runs in turns."""
    pool = ProcessPool()
    dynamic, static = [], []
    try:
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(REPEATS):
                dynamic.append(pool.run(train, 4, NUM_CANDIDATES, cache, timeout_s=400)[0])
                static.append(pool.run(train, 4, 1, cache, timeout_s=400)[0])
    finally:
        pool.close()
    ours = statistics.median(statistics.mean(found["seconds"]) for found in dynamic)
    peer = statistics.median(statistics.mean(found["seconds"]) for found in static)
    stall_s = statistics.median(statistics.mean(found["stalls_s"]) for found in dynamic)
    static_s, dynamic_s = dynamic[-1]["predicted_s"]
    changes = [a != b for a, b in zip(dynamic[-1]["plans"], dynamic[-1]["plans"][1:], strict=False)]
    return [
        Row(
            name="iteration, a plan for each, 4 emulated devices of speed 1:1:2:2",
            ours=ours,
            peer=peer,
            unit="s",
            target=1.0,
            better="higher",
            kind="measured",
            value=peer / ours,
            note=f"best static plan; predicted {static_s:.3f} and {dynamic_s:.3f} s of propagation; "
            f"{len(set(dynamic[-1]['plans']))} plans, {sum(changes)} changes in {len(changes)}",
        ),
        Row(
            name="share of a step that waits for its plan",
            ours=stall_s,
            peer=None,
            unit="s",
            target=0.01,
            better="lower",
            kind="measured",
            value=stall_s / ours,
            note="mean stall over mean step",
        ),
    ]
