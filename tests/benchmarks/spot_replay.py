"""A small simulator: training on a group of spot instances whose number follows a real trace.

Time passes in events: a change of the number of instances stops training, costs what was done since
the last usable checkpoint, then a restart and a recovery. Which instances go is drawn at random.
Recovery is what `Fetcher` chooses under the placement of `place_replicas`: each node's disk and
link and the one remote store work side by side at their bandwidths. The peer saves to the remote
store alone, uploads as often as its bandwidth allows, and restarts from there.

Both pay the same for a restart. No notice is assumed: every loss is a sudden one.

Where a run's own log is given (`SPOT_REPLAY_LOG=events.jsonl`, what `RunLog` has written of a run
with `ElasticRestart(in_place=True)`), ours goes on in place: a loss costs the seconds that it has
cost there, as `generation` events say, and steps only where both keepers of a part are gone.
"""

import itertools
import os
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_hetero.callbacks.run_log import read_log
from lightning_hetero.checkpoint import Location, Source, TierKind
from lightning_hetero.checkpoint.commit import place_replicas
from lightning_hetero.checkpoint.fetching import (
    Fetcher,
    FileRange,
    Locations,
    cut_into_chunks,
)
from lightning_hetero.checkpoint.manifest import CheckpointId, FileEntry, PartManifest
from tests.benchmarks.harness import Row

TRACES = Path(__file__).resolve().parents[2].parent / "shared/data/spot-traces"
SECONDS_PER_UNIT = {"g4dn": 1.0, "p2": 3600.0}
"""The first column is seconds in one file and hours in the other, as their spans show."""

STATE_BYTES = 12 * 6.7e9
"""fp32 weights and two moments of GPT-3 6.7B."""
DISK_BYTES_PER_S, REMOTE_BYTES_PER_S, LINK_BYTES_PER_S = 3500e6, 1200e6, 50e9
RESTART_S = 60.0
"""Rendezvous, imports, process groups, the first plan; the same for both."""
MERGE_S = 60.0
"""Changes closer than this are one restart."""
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class Policy:
    """How a system saves and recovers."""

    interval_s: float
    """Twice the seconds of work that a loss costs on average."""
    replicas: int
    """0: nothing but the remote store is used."""
    restart_s: float = RESTART_S
    """Seconds from a loss to the next step, without those of fetching the state."""
    keeps_live: bool = False
    """Whether those who are left go on from their own slices and their standbys'."""


def measured_idle_s(events: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the median seconds without a step of a run's changes of ranks; None without any."""
    idle = [event["idle_s"] for event in events if event["event"] == "generation"]
    return statistics.median(idle) if idle else None


def load_trace(path: Path) -> list[tuple[float, int]]:
    """Return (seconds, instances alive) after each change, close changes merged."""
    unit = next(scale for word, scale in SECONDS_PER_UNIT.items() if word in path.name)
    points: list[tuple[float, int]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        time_text, count = line.split(",")
        at_s = float(time_text) * unit
        if points and at_s - points[-1][0] < MERGE_S:
            points[-1] = (points[-1][0], int(count))
        elif not points or points[-1][1] != int(count):
            points.append((at_s, int(count)))
    return points


def share_of_training(points: Sequence[tuple[float, int]], policy: Policy, seed: int = 0) -> float:
    """Return the share of the time with instances in which lasting progress was made."""
    draw = random.Random(seed)
    names = itertools.count()
    alive: list[str] = []
    holders: dict[int, set[str]] = {}
    useful_s = available_s = 0.0
    for (at_s, count), (until_s, _) in itertools.pairwise(points):
        lost = set(draw.sample(alive, max(0, len(alive) - count)))
        before = bool(alive)
        alive = [node for node in alive if node not in lost]
        alive += [f"i{next(names)}" for _ in range(count - len(alive))]
        for nodes in holders.values():
            nodes -= lost
        if not alive:
            continue
        span_s = until_s - at_s
        available_s += span_s
        recovery_s, local = recovery_time_s(alive, holders, policy)
        if policy.keeps_live and before and local:
            span_s -= policy.restart_s + recovery_s
        elif before or holders:
            # Where both copies of a part are gone the remote store has an older checkpoint.
            redo_s = (policy.interval_s if local else 3 * STATE_BYTES / REMOTE_BYTES_PER_S) / 2
            span_s -= policy.restart_s + recovery_s + redo_s
        useful_s += max(0.0, span_s)
        holders = place(alive, policy)
    return useful_s / available_s


def place(alive: Sequence[str], policy: Policy) -> dict[int, set[str]]:
    """Return which nodes hold each part after the next checkpoint."""
    if not policy.replicas:
        return {part: set() for part in range(len(alive))}
    targets = place_replicas(alive, replicas=policy.replicas)
    return {
        part: {alive[part], *(alive[rank] for rank in ranks)} for part, ranks in enumerate(targets)
    }


def recovery_time_s(
    alive: Sequence[str], holders: Mapping[int, set[str]], policy: Policy
) -> tuple[float, bool]:
    """Return the time to fetch everything, and whether the local checkpoint could be used."""
    if not holders:
        return 0.0, True
    local = bool(policy.replicas) and all(holders.values())
    size = int(STATE_BYTES) // len(holders)
    manifests = {part: _manifest(part, size, len(holders)) for part in holders}
    places = {
        (part, "f"): tuple(sorted(Location(n, TierKind.DISK) for n in nodes))
        if local
        else (Location("", TierKind.REMOTE),)
        for part, nodes in holders.items()
    }
    needs = {rank: _even_share(rank, len(alive), len(holders), size) for rank in range(len(alive))}
    return _duration_s(needs, manifests, places, alive), local


def _duration_s(
    needs: Mapping[int, Sequence[FileRange]],
    manifests: Mapping[int, PartManifest],
    holders: Locations,
    nodes: Sequence[str],
) -> float:
    disk: dict[Location, int] = defaultdict(int)
    link: dict[str, int] = defaultdict(int)
    for rank, ranges in needs.items():
        fetcher = Fetcher(manifests, holders, node=nodes[rank], reach=lambda *_: None, turn=rank)
        for index, item in enumerate(cut_into_chunks(ranges, manifests, 1 << 30)):
            source, holder = fetcher.choose(item, rank + index)
            size = item.stop - item.start
            disk[holder] += size
            if source in (Source.PEER_MEMORY, Source.PEER_DISK):
                link[holder.node] += size
                link[nodes[rank]] += size
    speeds = [
        size / (REMOTE_BYTES_PER_S if h.kind is TierKind.REMOTE else DISK_BYTES_PER_S)
        for h, size in disk.items()
    ]
    return max([*speeds, *(size / LINK_BYTES_PER_S for size in link.values())])


def _manifest(part: int, size: int, world_size: int) -> PartManifest:
    return PartManifest(
        id=CheckpointId(1),
        part=part,
        world_size=world_size,
        num_layers=1,
        block_bytes=BLOCK_BYTES,
        files=(FileEntry("f", 0, size, ()),),
        slices=(),
        plan=None,
        versions={},
    )


def _even_share(rank: int, num_ranks: int, num_parts: int, size: int) -> list[FileRange]:
    total = num_parts * size
    start, stop = total * rank // num_ranks, total * (rank + 1) // num_ranks
    return [
        FileRange(part, "f", max(start - part * size, 0), min(stop - part * size, size))
        for part in range(num_parts)
        if start < (part + 1) * size and stop > part * size
    ]


def replay_rows() -> list[Row]:
    """Replay every trace there is; with measured seconds of a loss where a run's log is given."""
    log = os.environ.get("SPOT_REPLAY_LOG")
    idle_s = None if log is None else measured_idle_s(read_log(log))
    rows = []
    for path in sorted(TRACES.glob("*.csv")):
        points = load_trace(path)
        ours, peer = policies(max(count for _, count in points), idle_s)
        shares = [
            [share_of_training(points, policy, seed) for seed in range(10)]
            for policy in (ours, peer)
        ]
        mine, theirs = (sorted(values)[len(values) // 2] for values in shares)
        in_place = "" if idle_s is None else f"; ours in place, {idle_s:.2f} s a loss as measured"
        rows.append(
            Row(
                name=f"time spent training, {path.stem[:34]}, {len(points)} changes",
                ours=mine,
                peer=theirs,
                unit="share",
                target=1.0,
                better="higher",
                kind="simulated",
                value=mine / theirs,
                note="peer: restarts from a remote checkpoint, uploaded as often as it can"
                + in_place,
            )
        )
    return rows


def policies(most: int, idle_s: float | None) -> tuple[Policy, Policy]:
    """Return ours and the peer's for so many instances at most.

    Args:
        most: Instances.
        idle_s: What a loss costs in place, as it was measured; None restarts.
    """
    upload_s = STATE_BYTES / REMOTE_BYTES_PER_S
    # A part is written to its own disk and once more to a neighbour's.
    local_s = max(2 * STATE_BYTES / most / DISK_BYTES_PER_S, 30.0)
    # Saving without a pause, a crash loses the save under way and half of one before it.
    peer = Policy(interval_s=3 * upload_s, replicas=0)
    ours = Policy(interval_s=3 * local_s, replicas=2)
    if idle_s is not None:
        ours = replace(ours, restart_s=idle_s, keeps_live=True)
    return ours, peer
