"""Run unequal devices for real: four processes that compute at 1 : 1 : 2 : 2.

Forwards and backwards are stretched by sleeping, so two cores play four devices; they are busy for
3 / 8 of one core, because whoever waits for a core sleeps less. The planned run is what
`plan="auto"` makes of it, the even split one equal pipeline a rank; both train the same 48 samples
an iteration. Floor: the slow ranks' even share of 12 samples against 48 / (1 + 1 + 2 + 2) samples a
unit of speed is a ratio of 1.5, and more where small micro-batches stay in the cache; what
exchange, Lightning and the slowest of four noisy ranks take comes off.
"""

import os
import statistics
import tempfile
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import AutoPlan, HeteroStrategy, ParallelPlan
from lightning_hetero.models import HeteroLM, LMConfig, packed_cross_entropy
from lightning_hetero.planner.contingency import PlanBasis
from lightning_hetero.simulator import simulate
from lightning_hetero.testing import EmulatedDevices
from tests.benchmarks.harness import Row
from tests.benchmarks.steps import StepTimes, in_turns, processes
from tests.toy import quiet

SLOWDOWNS = (16.0, 16.0, 8.0, 8.0)
LENGTH = 256
SAMPLES = 12
NUM_ITERATIONS = 5
REPEATS = 3
CONFIG = LMConfig(vocab_size=256, hidden_size=256, num_layers=2, num_heads=4, intermediate_size=512)


class Rows(L.LightningModule):
    """The reference model on rows of equal length."""

    def __init__(self) -> None:
        super().__init__()
        self.model = HeteroLM(CONFIG)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (ids,) = batch
        rows, length = ids.shape
        starts = torch.arange(0, rows * length + 1, length, dtype=torch.int32)
        positions = torch.arange(length).repeat(rows)
        logits = self.model(ids.reshape(-1), starts, positions, length)
        return packed_cross_entropy(logits, ids.reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class TimesAndPlan(StepTimes):
    """Also keeps the plan."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.plan = trainer.strategy.plan


def train(rank: int, plan: Any, cache: str) -> dict[str, Any]:
    """Train a few iterations and return their median seconds, and what the plan rests on."""

    os.environ["LIGHTNING_HETERO_CACHE"] = cache
    torch.manual_seed(1)
    strategy, times = HeteroStrategy(plan), TimesAndPlan()
    options = quiet(devices=len(SLOWDOWNS), strategy=strategy, max_steps=NUM_ITERATIONS)
    trainer = L.Trainer(**options | {"callbacks": [times, EmulatedDevices(SLOWDOWNS)]})
    ids = torch.randint(CONFIG.vocab_size, (SAMPLES * 4 * NUM_ITERATIONS, LENGTH))
    module, loader = Rows(), DataLoader(TensorDataset(ids), batch_size=SAMPLES)
    trainer.fit(module, loader)
    auto = strategy.auto_planned
    # The first iterations exchange reports and warm caches up.
    return {
        "seconds": statistics.median(times.seconds),
        "plan": times.plan,
        "basis": None if auto is None else auto.basis,
    }


def predict_s(plan: ParallelPlan, basis: PlanBasis, microbatch_size: int) -> float:
    """Return the simulated seconds of an iteration of all ranks' samples."""
    counts = [pipeline.num_microbatches or 1 for pipeline in plan.pipelines]
    batches = [[(LENGTH,) * microbatch_size] * count for count in counts]
    return simulate(plan, basis.cost(), batches).iteration_time_s


def run() -> list[Row]:
    """Time both plans in turns and compare their ratio with the simulator's."""
    with processes() as pool, tempfile.TemporaryDirectory() as cache:
        plans = {"planned": AutoPlan(sequence_length=LENGTH), "even": None}
        ways = {name: partial(pool.run, train, 4, plan, cache) for name, plan in plans.items()}
        runs = in_turns(ways, REPEATS)
    planned, even = ([ranks[0] for ranks in runs[name]] for name in plans)
    ours = statistics.median(run["seconds"] for run in planned)
    peer = statistics.median(run["seconds"] for run in even)
    basis = planned[-1]["basis"]
    size = basis.workload.sequences_per_microbatch
    predicted_ours = predict_s(planned[-1]["plan"], basis, size)
    predicted_peer = predict_s(even[-1]["plan"], basis, SAMPLES)
    predicted, measured = predicted_peer / predicted_ours, peer / ours
    counts = [pipeline.num_microbatches for pipeline in planned[-1]["plan"].pipelines]
    return [
        Row(
            name="iteration, 4 emulated devices of speed 1:1:2:2",
            ours=ours,
            peer=peer,
            target=1.4,
            better="higher",
            note=f"even split; planned: micro-batches {counts} of {size}",
        ),
        Row(
            name="ratio of even split to plan, predicted against measured",
            ours=predicted,
            peer=measured,
            unit="x",
            target=0.1,
            value=abs(predicted / measured - 1),
            note=f"predicted {predicted_ours:.3f} s and {predicted_peer:.3f} s",
        ),
    ]
