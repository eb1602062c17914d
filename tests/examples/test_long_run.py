"""The long run, in virtual time: what was done to it was found, and cost nothing but time."""

import subprocess
from pathlib import Path

import pytest

from examples.long_run_timeline import compare, find_phases
from lightning_hetero.callbacks import read_log
from tests.fast_python import fast_python
from tests.processes import clean_environment

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return the run's events, the undisturbed run's, and what was printed."""
    folder = tmp_path_factory.mktemp("long_run")
    finished = subprocess.run(
        [
            fast_python(),
            ROOT / "examples/long_run.py",
            f"--out={folder}",
            "--first-callback=tests.callbacks.virtual_time:of_a_process",
        ],
        env=clean_environment(COLUMNS="200", PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    run, undisturbed = (
        list(read_log(folder / name / "events.jsonl")) for name in ("run", "undisturbed")
    )
    return run, undisturbed, finished.stdout


def after(events, kind, **fields):
    """Return the events behind the first of a kind."""
    wanted = {"event": kind, **fields}
    index = next(i for i, event in enumerate(events) if wanted.items() <= event.items())
    return events[index + 1 :]


def of_kind(events, kind):
    return [event for event in events if event["event"] == kind]


def test_it_trains_what_an_undisturbed_run_does(done):
    run, undisturbed, _ = done
    assert len(of_kind(run, "started")[0]["plans"]) > 1
    assert len(of_kind(run, "plan")) > len(of_kind(run, "started")), "plans change"
    same = compare(run, undisturbed)
    assert same.num_steps > 50
    assert same.num_samples > same.num_steps
    assert same.num_other_samples == 0
    assert same.val_loss[0] == pytest.approx(same.val_loss[1], abs=1e-4)
    assert same.max_loss_difference < 1e-3


def test_every_fault_is_found_and_worked_around(done):
    run, _, _ = done
    nodes = of_kind(run, "started")[0]["nodes"]
    slow = next(e for e in of_kind(run, "faults") if "slowdown" in (e["faults"] or [{}])[0])
    found = of_kind(after(run, "faults", faults=slow["faults"]), "finding")
    assert [slow["faults"][0]["global_rank"]] in [finding["ranks"] for finding in found]
    assert slow["faults"][0]["global_rank"] == nodes.index("c")
    kinds = [(e["kind"], e["mitigation"]) for e in of_kind(run, "action") if e["kind"] != "keep"]
    assert kinds.index(("apply", "S2")) < kinds.index(("undo", "S2"))

    link = next(e for e in of_kind(run, "faults") if "bytes_per_s" in (e["faults"] or [{}])[0])
    found = of_kind(after(run, "faults", faults=link["faults"]), "finding")
    assert link["faults"][0]["ranks"] in [finding["ranks"] for finding in found]

    killed = after(run, "killed", node="d")
    assert "PeerError" in of_kind(killed, "failed")[0]["error"]
    recovered = of_kind(killed, "recovered")[0]
    assert (recovered["world_size"], recovered["saved_by"]) == (3, 4)
    assert not recovered["bytes_by_source"].get("remote"), "neighbours had copies"
    assert of_kind(after(run, "joined", node="d"), "started")[0]["nodes"].count("d") == 1

    noticed = after(run, "notice", node="b")
    leaving = of_kind(noticed, "leaving")[0]
    assert leaving["error"] is None
    recovered = of_kind(noticed, "recovered")[0]
    assert recovered["step"] == leaving["step"]
    assert recovered["lost_steps"] == 0
    assert "b" not in of_kind(noticed, "started")[-1]["nodes"]


def test_the_timeline_tells_it(done):
    run, undisturbed, text = done
    for words in (
        "FAULT node c computes 3x slower",
        "detected: device of c",
        "mitigated: S2 assigned less to rank",
        "FAULT link ",
        "detected: link of ",
        "FAULT node d is killed",
        "recovered: ",
        "FAULT node b gets a spot notice",
        "drained: b leaves",
        f"validation loss   {compare(run, undisturbed).val_loss[0]:.6f}, undisturbed",
    ):
        assert words in text, text
    phases = find_phases(run, {"a": 8.0, "b": 8.0, "c": 4.0, "d": 4.0})
    trained = [phase for phase in phases if phase.num_tokens]
    assert trained[0].speed == pytest.approx(0.75)
    assert all(phase.tokens_per_s > 0 for phase in trained)
    for phase in trained:
        assert f"{phase.tokens_per_s:,.0f}" in text
