"""Whatever is killed, torn or full: training goes on as if nothing had happened.

Real torchrun agents on loopback, each a node with a disk and a shared memory of its own. One run
takes many faults one after another, so that the start of the agents is paid once. Nodes come and go
in `tests.examples.test_long_run`, and all of it at random in `test_soak`.
"""

import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.checkpoint import LocalStore, Tier, TierKind
from lightning_hetero.checkpoint.inspection import look, verify
from tests.callbacks.faults import FILES, METHODS
from tests.callbacks.nodes import Nodes

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS = 84
EVERY = 2
Steps = dict[tuple[int, int], tuple[str, int]]


def steps_of(records: Sequence[dict[str, Any]]) -> list[tuple[tuple[int, int], tuple[str, int]]]:
    """Return ((step, pipeline), (loss, samples)) of all that was trained, also twice."""
    return [
        ((item["step"], item["pipeline"]), (item["loss"], item["samples"]))
        for item in records
        if "step" in item
    ]


@pytest.fixture(scope="module")
def folders() -> Iterator[Path]:
    """Give a folder in shared memory where there is some: its fsync costs nothing."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def uninterrupted(folders: Path) -> Steps:
    """Return each pipeline's losses and samples of a run on two nodes without faults."""
    with Nodes(folders / "uninterrupted", steps=NUM_STEPS, every=NUM_STEPS) as nodes:
        assert nodes.wait_for_end() == [0, 0], nodes.logs()
        steps = dict(steps_of(nodes.records()))
    assert len(steps) == 2 * NUM_STEPS
    assert len({samples for _, samples in steps.values()}) > NUM_STEPS / 2
    return steps


def check(nodes: Nodes, uninterrupted: Steps) -> None:
    """All steps were trained as without faults, and no checkpoint that was safe was lost."""
    trained = steps_of(nodes.records())
    assert dict(trained).keys() == uninterrupted.keys()
    for key, found in trained:
        assert found == uninterrupted[key], f"(step, pipeline) {key}"
    for path in sorted(nodes.folder.glob("*.jsonl")):
        safe = 0
        for item in nodes.records(path.stem):
            assert item.get("begin", safe) >= safe, f"{path.stem} lost checkpoint {safe}"
            safe = max(safe, item.get("confirmed", 0))


def kills(random_: random.Random) -> list[dict[str, Any]]:
    """Return a fault at each kind of moment, in a random order, on a random node."""
    longest = {"recovery": 1, "set-up": 1, "confirmation": 2, "manifest": 4, "snapshot": 3}
    longest |= {"forward": 16, "copy to a peer": 30}
    moments = [*METHODS, *FILES]
    random_.shuffle(moments)
    return [
        {
            "at": moment,
            "node": random_.choice("ab"),
            "after": random_.randint(1, longest.get(moment, 8)),
        }
        for moment in moments
    ]


DAMAGES: list[dict[str, Any]] = [
    {"what": "flip", "tier": "a/memory", "files": "layer-*.safetensors"},
    {"what": "truncate", "tier": "b/disk", "files": "before*"},
    {"what": "delete", "tier": "a/disk", "files": "*.pt"},
    {"what": "flip", "tier": "b/memory", "files": "part-*.json"},
]


def test_killed_at_any_moment_it_trains_on_bit_for_bit(folders: Path, uninterrupted: Steps) -> None:
    faults = kills(random.Random(11))
    faults += [
        {"at": "forward", "node": "a", "after": 12, "signal": signal.SIGTERM},
        {"at": "forward", "node": "b", "after": 14, "full": "disk file"},
        {"at": "forward", "node": "a", "after": 14, "damage": DAMAGES},
    ]
    folder = folders / "killed"
    remote = folder / "remote"
    settings = {"steps": NUM_STEPS, "every": EVERY, "replicas": 2, "remote": str(remote)}
    with Nodes(folder, faults=faults, **settings) as nodes:
        assert nodes.wait_for_end() == [0, 0], nodes.logs()
        assert int((folder / "next-fault").read_text()) == len(faults)
        check(nodes, uninterrupted)
    tier = Tier(kind=TierKind.REMOTE, store=LocalStore(remote))
    assert verify(look([tier]), [tier]) == []


def test_a_restart_without_a_slow_node_trains_on_with_the_others(
    folders: Path, uninterrupted: Steps
) -> None:
    settings = {"steps": NUM_STEPS, "every": EVERY, "replicas": 2, "restart_at": 11}
    with Nodes(folders / "restart", nnodes="1:2", missed_beats=3, **settings) as nodes:
        codes = nodes.wait_for_end()
        slow = next(n for n in "ab" if [i["rank"] for i in nodes.records(n) if "rank" in i] == [1])
        (other,) = {*"ab"} - {slow}
        begun = [(i["begin"], i["rank"]) for i in nodes.records(other) if "begin" in i]
        trained = {name: steps_of(nodes.records(name)) for name in "ab"}
    assert codes["ab".index(other)] == 0, nodes.logs()
    assert begun == [(0, 0), (12, 0)], "the step after the request is saved, and none is repeated"
    assert [step for (step, _), _ in trained[slow]] == [*range(1, 13)]
    assert [step for (step, _), _ in trained[other]] == [*range(1, NUM_STEPS + 1)]
    for (step, _), (loss, _) in trained[other]:
        expected = float.fromhex(uninterrupted[step, 0][0])
        assert float.fromhex(loss) == pytest.approx(expected, rel=1e-5), step
