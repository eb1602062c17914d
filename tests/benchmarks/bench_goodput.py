"""What faults cost a run that goes on for minutes: ours in place, torchft, torchrun's restarts.

Four workers of one toy on gloo; every 30 s one of them, in turn, is killed, and another one takes
its place at once: a newcomer with ours (`redundancy=1`), a new replica group of one process with
torchft, all four with torchrun. Each sample takes 25 ms, as on a device of its own, so that two
cores can play four. All workers are forks of processes that have imported torch. torchft has its
DDP and its Lighthouse, with our heartbeat's limit and a quorum that waits 1 s for who is alive: its
default of 0.1 s leaves live replicas out where four share two cores. All train the same module with
the same AdamW in fp32, 4 samples a worker and step, log nothing and keep their rate. Ours owns
whole parameters, as torchft does, and saves a checkpoint every 200 steps, about as often as a
worker is lost; torchrun's restarts, which read them, every 20; torchft none. Ours runs in
Lightning's loop, torchft in a bare one.

* seconds without training: pauses between two ends of steps above three usual ones, without a usual
  one. A step that is trained again, or with fewer workers, is none.
* steps lost: trained again from a checkpoint; with torchft, attempts that weren't committed, whose
  samples nobody trains again.
* pace: samples a second before the first fault, which tells what steps cost from what faults do.
* goodput: samples that the weights at the end have learnt from, a second. Where a replica is away,
  torchft's steps have fewer samples; ours have all.

`--minutes` says for how long each of the three is watched: 10 by default, so half an hour in all.
`--only torchft` and `--only torchrun` watch ours and that peer. With `--row-ms 100` a step takes
0.4 s, not 0.1, so what Python adds to it weighs less.
"""

from contextlib import AbstractContextManager
from typing import Literal

from tests.benchmarks import faulty_runs
from tests.benchmarks.faulty_runs import Faulty, Outcome, watch
from tests.benchmarks.harness import Row
from tests.benchmarks.paced_toy import BATCH, ROW_MS
from tests.benchmarks.torchft_environment import python_with_torchft

FAULT_EVERY_S = 30.0
MINUTES = 10.0


def run(minutes: float = MINUTES, only: str = "", row_ms: float = ROW_MS) -> list[Row]:
    """Watch ours and both peers, or the one whose name holds a text."""
    rows: list[Row] = []
    pace = f"steps of {row_ms * BATCH / 1000:g} s"
    ours = _watch(faulty_runs.in_place(row_ms), minutes)
    if only in "torchft":
        python, version = python_with_torchft()
        peer = _watch(faulty_runs.torchft(row_ms, python), minutes)
        rows += _rows(ours, peer, f"torchft {version}, {pace}")
    if only in "torchrun":
        peer = _watch(faulty_runs.torchrun(row_ms), minutes)
        rows += _rows(ours, peer, f"torchrun's restarts, {pace}")
    return rows


def _watch(run: AbstractContextManager[Faulty], minutes: float) -> Outcome:
    with run as faulty:
        return watch(faulty, seconds=60.0 * minutes, every_s=FAULT_EVERY_S)


def _rows(ours: Outcome, peer: Outcome, name: str) -> list[Row]:
    """Return ours against a peer's."""
    figures: tuple[tuple[str, str, Literal["lower", "higher"], float, float], ...] = (
        ("seconds without training", "s", "lower", ours.idle_s, peer.idle_s),
        ("steps lost", "steps", "lower", ours.lost_steps, peer.lost_steps),
        ("pace before the first fault", "1/s", "higher", ours.steady_per_s, peer.steady_per_s),
        ("goodput", "1/s", "higher", ours.samples_per_s, peer.samples_per_s),
    )
    return [
        Row(
            name=f"{what}, {ours.num_faults} faults, one every {FAULT_EVERY_S:.0f} s",
            ours=own,
            peer=other,
            unit=unit,
            target=1.0,
            better=better,
            value=own / other if other else float(own > 0),
            note=f"{name}; of the usual pace {ours.share:.1%}, the peer {peer.share:.1%}",
        )
        for what, unit, better, own, other in figures
    ]
