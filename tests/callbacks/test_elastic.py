"""Whatever is killed, torn, lost or added: training goes on as if nothing had happened.

Real torchrun agents on loopback, each a node with a disk and a shared memory of its own. One run
takes many faults one after another, so that the start of the agents is paid once.
"""

import math
import random
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.checkpoint import LocalStore, Tier, TierKind
from lightning_hetero.checkpoint.inspection import look, verify
from lightning_hetero.straggler import ActionEvent, DecisionKind, Finding, Mitigation, read_events
from tests.callbacks.faults import FILES, METHODS
from tests.callbacks.nodes import Nodes
from tests.callbacks.servers import MetadataServer, Mode, S3Server, UnreliableProxy

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_STEPS = 84
EVERY = 2
SLOW_FROM = 44
Steps = dict[tuple[int, int], tuple[float, int]]


def steps_of(records: Sequence[dict[str, Any]]) -> list[tuple[tuple[int, int], tuple[float, int]]]:
    """Return ((step, pipeline), (loss, samples)) of all that was trained, also twice."""
    return [
        ((item["step"], item["pipeline"]), (float.fromhex(item["loss"]), item["samples"]))
        for item in records
        if "pipeline" in item
    ]


def planned_losses(records: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return (step, loss) of all that was trained under an automatic plan."""
    return [
        (item["step"], float.fromhex(item["loss"]))
        for item in records
        if "step" in item and "pipeline" not in item
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
    with Nodes(folders / "uninterrupted", "2", steps=NUM_STEPS, every=NUM_STEPS) as nodes:
        nodes.start("a", "b")
        assert nodes.wait_for_end("a", "b") == [0, 0], nodes.logs()
        steps = dict(steps_of(nodes.records()))
    assert len(steps) == 2 * NUM_STEPS
    assert len({samples for _, samples in steps.values()}) > NUM_STEPS / 2
    return steps


def check(
    nodes: Nodes, uninterrupted: Steps, *, num_steps: int = NUM_STEPS, tolerance: float = 0.0
) -> None:
    """All steps were trained as without faults, and no checkpoint that was safe was lost."""
    trained, planned = steps_of(nodes.records()), planned_losses(nodes.records())
    keys = {key for key, _ in trained} | {(step, p) for step, _ in planned for p in (0, 1)}
    assert keys == {(step, p) for step, p in uninterrupted if step <= num_steps}
    for key, (_, samples) in trained:
        assert samples == uninterrupted[key][1], f"other samples in (step, pipeline) {key}"
    losses = [(step, loss) for (step, _), (loss, _) in trained] + planned
    for step, loss in losses:
        expected = uninterrupted[step, 0][0]
        if not math.isclose(loss, expected, rel_tol=tolerance, abs_tol=0.0):
            raise AssertionError(f"step {step}: loss {loss}, not {expected}")
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
    with Nodes(folder, "2", faults=faults, **settings) as nodes:
        nodes.start("a", "b")
        assert nodes.wait_for_end("a", "b") == [0, 0], nodes.logs()
        assert int((folder / "next-fault").read_text()) == len(faults)
        check(nodes, uninterrupted)
    tier = Tier(kind=TierKind.REMOTE, store=LocalStore(remote))
    assert verify(look([tier]), [tier]) == []


def test_nodes_come_and_go_and_the_loss_curve_stays(folders: Path, uninterrupted: Steps) -> None:
    settings = {"steps": NUM_STEPS, "every": EVERY, "replicas": 2}
    settings |= {"watched": 4, "slow_node": "f", "slow_from": SLOW_FROM, "planned": 3}
    with (
        MetadataServer() as metadata,
        Nodes(folders / "elastic", "2:4", metadata_url=metadata.url, **settings) as nodes,
    ):
        nodes.let_go_on_to(4)
        nodes.start("a", "b")
        nodes.wait_until(lambda: nodes.last("confirmed", "a") >= 4)

        nodes.start("c", "d")
        nodes.wait_until(lambda: nodes.last("world_size", "c") == 4)
        nodes.let_go_on_to(10)
        nodes.wait_until(lambda: nodes.last("confirmed", "a", "b", "c", "d") >= 10)

        # Every second one of a ring: what is lost has its copy on a node that stays.
        lost = [name for name in "abcd" if nodes.rank_of(name) in (0, 2)]
        stayed = [name for name in "abcd" if name not in lost]
        nodes.lose(*lost)
        nodes.let_go_on_to(30)
        nodes.wait_until(lambda: nodes.last("confirmed", *stayed) >= 30)

        # One of the new nodes turns out to be slow; those that stay plan anew without it.
        nodes.start("e", "f")
        nodes.wait_until(lambda: nodes.last("world_size", "e") == 4)
        nodes.let_go_on_to(68)
        nodes.wait_for_end("f")
        nodes.wait_until(lambda: nodes.last("confirmed", "e") >= 68)
        events = read_events(nodes.folder / "events")
        (found,) = (event for event in events if isinstance(event, Finding))
        (done,) = (
            event.mitigation
            for event in events
            if isinstance(event, ActionEvent) and event.kind is DecisionKind.APPLY
        )
        assert found.ranks == (nodes.rank_of("f"),)
        assert done is Mitigation.RESTART
        begun = [item for item in nodes.records("e") if "begin" in item]
        assert begun[-1]["world_size"] == 3
        assert begun[-1]["is_planned"]
        assert begun[-1]["begin"] > SLOW_FROM

        metadata.take_away(stayed[0])
        nodes.let_go_on_to(NUM_STEPS)
        nodes.wait_for_end(stayed[0])
        assert nodes.wait_for_end(stayed[1], "e") == [0, 0], nodes.logs()
        begun = [item for item in nodes.records("e") if "begin" in item]
        assert begun[-1]["world_size"] == 2
        assert begun[-1]["begin"] >= 68
        check(nodes, uninterrupted, tolerance=1e-5)


@pytest.mark.slow
def test_a_failing_remote_never_stops_training_and_brings_lost_nodes_back(
    folders: Path, uninterrupted: Steps, s3: S3Server
) -> None:
    with UnreliableProxy(s3.port) as proxy:
        settings: dict[str, Any] = {
            "steps": 50,
            "every": EVERY,
            "remote": "s3://bucket/elastic",
        }
        settings["storage_options"] = s3.options(proxy.port)
        with Nodes(folders / "remote", "2", **settings) as nodes:
            nodes.let_go_on_to(0)
            nodes.start("a", "b")
            for step, mode in enumerate((Mode.GOOD, Mode.ERROR, Mode.DOWN, Mode.SLOW), 1):
                proxy.mode = mode
                nodes.let_go_on_to(6 * step)
                nodes.wait_until(lambda step=step: nodes.last("confirmed") >= 6 * step)
                nodes.wait_until(lambda mode=mode: proxy.num_requests[mode] > 0)
            proxy.mode = Mode.GOOD
            # While an upload runs, later checkpoints stay local.
            nodes.wait_until(lambda: not nodes.is_uploading("a") and not nodes.is_uploading("b"))
            nodes.let_go_on_to(30)
            nodes.wait_until(lambda: nodes.last("uploaded", "a") >= 26)
            nodes.wait_until(lambda: nodes.last("uploaded", "b") >= nodes.last("uploaded", "a"))
            safe = nodes.last("uploaded", "a")
            nodes.lose("a", "b")

            proxy.mode = Mode.SLOW
            nodes.let_go_on_to(settings["steps"])
            nodes.start("c", "d")
            nodes.wait_until(lambda: nodes.last("begin", "c") >= 0)
            proxy.mode = Mode.GOOD
            assert nodes.wait_for_end("c", "d") == [0, 0], nodes.logs()
            assert next(i["begin"] for i in nodes.records("c") if "begin" in i) >= safe
            check(nodes, uninterrupted, num_steps=settings["steps"])
