"""`lightning-hetero report`: one page of a run; and the page of a plan."""

import gzip
import json
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from lightning_hetero.cli import main
from lightning_hetero.cli.report import render
from lightning_hetero.cli.run_page.history import read_history
from lightning_hetero.cli.run_page.plan_page import draw_plan
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import RooflineCost, simulate
from tests.plans import pipeline, plan_of, stage
from tests.straggler.emulated import Planted

pytest.importorskip("jinja2")

EVIL = "<script>alert(1)</script>"
PLAN = plan_of(pipeline(stage(0, 0, 4)), pipeline(stage(1, 0, 1), stage(2, 1, 4)))
MEMORY = [[2.0e9, 2.5e9], [1.0e9, 0.0], [1.5e9, 1.2e9]]


def write_run(folder, *, num_steps=60, ends=True, now_s=1.7e9):
    """Write the log of a run that is slow for a while, changes its plan and loses a rank."""
    folder.mkdir(exist_ok=True)
    nodes = [EVIL, "node-b", "node-b"]
    entries = [{"event": "started", "step": 0, "nodes": nodes, "plans": [PLAN]}]
    entries += [{"event": "plan", "step": 1, "number": 0}]
    for step in range(1, num_steps + 1):
        seconds = 1.8 if num_steps // 3 < step < num_steps // 2 else 1.0
        iteration = {"iteration_s": seconds, "predicted_s": 0.9}
        entries.append({"event": "iteration", "step": step, **iteration})
        if step % 10 == 0:
            scalars = {"run/iteration_s": seconds, "run/tokens_per_s": 9e3 / seconds}
            scalars |= {"run/bubble_share": 0.3, "run/exchange_wait_s": 0.05}
            entries.append({"event": "metrics", "step": step, "scalars": scalars, "memory": MEMORY})
            complete = {"memory": step, "disk": step - 10}
            entries.append({"event": "checkpoint", "step": step, "complete": complete})
    lost = {"generation": 1, "ranks": 2, "idle_s": 2.0, "steps_again": 0, "lost": [2], "joined": []}
    entries.append({"event": "generation", "step": num_steps, **lost})
    entries += [{"event": "ended", "step": num_steps}] if ends else []
    first_s = now_s - len(entries)
    lines = [json.dumps({"at_s": first_s + i, **entry}) for i, entry in enumerate(entries)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


def page_of(folder):
    return render(read_history(folder))


def test_the_page_shows_the_run_and_escapes_names(tmp_path):
    write_run(tmp_path / "run")
    output = tmp_path / "run.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(output)]) == 0
    page = output.read_text()
    assert EVIL not in page
    for words in (
        "&lt;script&gt;alert(1)&lt;/script&gt;",
        "Ended as planned",
        "rank 0: layers 0 to 3",
        "rank 1: layer 0",
        "lost [2]",
        "1.4 GiB in use, 1.12 pred",
        "Seconds of an iteration",
        "Tokens per second",
        "Share of an iteration",
    ):
        assert words in page
    assert not re.search(r"(src|href)=\"(?!data:)", page), "something is loaded from elsewhere"
    figures = re.findall(r"<svg viewBox.*?</svg>", page, flags=re.DOTALL)
    assert len(figures) == 7
    for figure in figures:
        left, top, width, height = map(float, ET.fromstring(figure).attrib["viewBox"].split())
        for point in " ".join(re.findall(r'points="([^"]+)"', figure)).split():
            x, y = map(float, point.split(","))
            assert left <= x <= left + width
            assert top <= y <= top + height


def test_it_tells_running_and_dead_runs_apart_and_leaves_out_a_torn_line(tmp_path):
    write_run(tmp_path / "dead", ends=False)
    write_run(tmp_path / "running", ends=False, now_s=time.time())
    with (tmp_path / "running/events.jsonl").open("a") as file:
        file.write('{"event": "iterat')
    assert "the run seems dead" in page_of(tmp_path / "dead")
    assert "Still running" in page_of(tmp_path / "running")


def test_recordings_of_any_job_and_operation_traces_are_shown(tmp_path):
    columns = Planted(slow_rank=(2, 2.0)).columns()
    values = zip(*(items.tolist() for items in columns.values()), strict=True)
    rows = [dict(zip(columns, row, strict=True)) for row in values]
    (tmp_path / "times.jsonl").write_text("\n".join(map(str, [0.5] * 60 + [0.9] * 60)))
    (tmp_path / "operations.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # Files of all ranks are one trace; one of them is torn.
    (tmp_path / "operations").mkdir()
    for rank in range(16):
        lines = "".join(json.dumps(row) + "\n" for row in rows if row["rank"] == rank)
        path = tmp_path / "operations" / f"operations-rank{rank}.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode())[: None if rank else -9])
    history = read_history(tmp_path)
    assert sum("rank 2, " in verdict for verdict in history.verdicts) == 2
    assert "slowdown" in render(history)


def test_a_folder_without_logs_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no event log" in capsys.readouterr().err


def test_100_000_steps_take_five_seconds_and_three_megabytes(tmp_path):
    write_run(tmp_path, num_steps=100_000)
    began = time.process_time()
    page = page_of(tmp_path)
    assert time.process_time() - began < 5.0
    assert len(page.encode()) < 3e6


def run_page(folder):
    write_run(folder / "run")
    return page_of(folder / "run")


def plan_page(folder):
    plan = ParallelPlan.even(world_size=4, num_layers=32, num_stages=2)
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=4),))
    cost = RooflineCost(cluster, replace(ModelSpec.load("llama-7b"), name=EVIL))
    found = simulate(plan, cost, [[(2048,)] * 4] * 2, record_events=True)
    draw_plan(folder / "plan.html", plan, cost, found)
    return (folder / "plan.html").read_text()


def test_a_plan_page_says_the_numbers_of_its_bars(tmp_path):
    page = plan_page(tmp_path)
    assert "<script>" not in page
    for kind in ("forward", "backward"):
        assert page.count(f"<title>{kind} of micro-batch") == 2 * 2 * 4
    assert page.count("<title>activations: ") == 4
    assert "http" not in page


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
@pytest.mark.parametrize("make_page", [run_page, plan_page])
def test_a_browser_shows_it_without_errors(tmp_path, make_page):
    page, profile, picture = (tmp_path / name for name in ("page.html", "profile", "page.png"))
    page.write_text(make_page(tmp_path))
    options = "headless no-sandbox disable-gpu no-first-run disable-background-networking"
    options += " disable-component-update disable-sync enable-logging=stderr v=0"
    command = ["chromium", *(f"--{option}" for option in options.split())]
    command += [f"--user-data-dir={profile}", f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 10_000
