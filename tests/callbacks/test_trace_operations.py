"""`TraceOperations` writes the operations of a run, which explain what slows it."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.callbacks import StragglerMonitor, TraceOperations, trace_operations
from lightning_hetero.cli import main
from lightning_hetero.straggler import Finding, FindingKind, read_events
from lightning_hetero.straggler.traces import read_operations
from lightning_hetero.testing import EmulatedDevices
from tests.processes import ProcessPool
from tests.toy import ToyModule, ToyOptions, loader, quiet

NUM_STEPS, NUM_MICROBATCHES = 9, 4


class CountedTrace(TraceOperations):
    """Asks for one more step."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        if trainer.global_step == 6:
            self.trace_next()


def train(rank: int, folder: str) -> None:
    torch.manual_seed(0)
    plan = ParallelPlan.even(world_size=4, num_layers=4, num_stages=2)
    trainer = L.Trainer(
        **quiet(
            devices=4,
            strategy=HeteroStrategy(plan, num_microbatches=NUM_MICROBATCHES),
            max_steps=NUM_STEPS,
            callbacks=[
                EmulatedDevices((60.0, 60.0, 60.0, 180.0)),
                CountedTrace(every_n_steps=2),
                StragglerMonitor(admission=1.3),
            ],
        ),
        default_root_dir=folder,
    )
    trainer.fit(ToyModule(ToyOptions(num_layers=4)), loader(16 * NUM_STEPS, 8))


@pytest.mark.slow
def test_a_run_is_traced_every_so_many_steps_and_when_asked_and_explained(
    pool: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool.run(train, 4, str(tmp_path))
    trace = read_operations(tmp_path / "operations")
    assert sorted(set(trace.rank.tolist())) == [0, 1, 2, 3]
    each = {
        "pull": 4,
        "push": 4,
        "optimizer": 4,
        "forward-compute": 4 * NUM_MICROBATCHES,
        "backward-compute": 4 * NUM_MICROBATCHES,
    }
    each |= {
        f"{way}-{end}": 2 * NUM_MICROBATCHES
        for way in ("forward", "backward")
        for end in ("send", "recv")
    }
    steps = 6  # Steps 0, 2, 4, 6, 8, and 6 or 7 as asked.
    counts = Counter(trace.kinds[kind] for kind in trace.kind)
    assert counts["pull"] in (4 * steps, 4 * (steps - 1))
    assert counts == {name: count * counts["pull"] // 4 for name, count in each.items()}

    shares = tmp_path / "shares.json"
    assert main(["stragglers", "explain", str(tmp_path / "operations"), "--json", str(shares)]) == 0
    first = json.loads(shares.read_text())["causes"][0]
    assert (first["kind"], first["which"]) == ("rank", 3)
    assert "replace" in capsys.readouterr().out

    events = read_events(tmp_path / "events.jsonl")
    named = [e for e in events if isinstance(e, Finding) and e.step == 0]
    devices = {e.ranks for e in named if e.kind is FindingKind.DEVICE}
    assert devices == {(3,)}, "the slow device is named before it works"


def test_a_full_disk_costs_the_trace_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does the file grow for ever; `/dev/full` has room for nothing."""
    path, lines = tmp_path / "operations-rank0.jsonl.gz", '{"step": 1}\n'
    trace_operations._append(Path("/dev/full"), lines)
    monkeypatch.setattr(trace_operations, "_MOST_BYTES", 1)
    for _ in range(3):
        trace_operations._append(path, lines)
    assert gzip.decompress(path.read_bytes()).decode() == lines
