"""`lightning-hetero report`: one page of a run."""

import gzip
import json
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_hetero.cli import main
from lightning_hetero.cli.report import render
from lightning_hetero.cli.run_page.plan_page import draw_plan
from lightning_hetero.cli.run_page.story import read_story
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.simulator import RooflineCost, simulate
from tests.straggler.emulated import Planted

pytest.importorskip("jinja2")

EVIL = "<script>alert(1)</script>"
PLAN = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 4]}]},
        {"stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 4]}]},
    ]
}


def write_run(
    folder: Path, *, num_steps: int = 60, ends: bool = True, now_s: float = 1.7e9
) -> None:
    """Write the log of a run that is slow for a while, changes its plan and loses a rank."""
    folder.mkdir(exist_ok=True)
    entries = [
        {"event": "started", "step": 0, "nodes": [EVIL, "node-b", "node-b"], "plans": [PLAN]},
        {"event": "plan", "step": 1, "number": 0},
    ]
    for step in range(1, num_steps + 1):
        seconds = 1.8 if num_steps // 3 < step < num_steps // 2 else 1.0
        iteration = {"iteration_s": seconds, "predicted_s": 0.9}
        entries.append({"event": "iteration", "step": step, **iteration})
        if step % 10 == 0:
            scalars = {"run/iteration_s": seconds, "run/tokens_per_s": 9e3 / seconds}
            scalars |= {"run/bubble_share": 0.3, "run/exchange_wait_s": 0.05}
            memory = [[2.0e9, 2.5e9], [1.0e9, 0.0], [1.5e9, 1.2e9]]
            entries.append({"event": "metrics", "step": step, "scalars": scalars, "memory": memory})
            complete = {"memory": step, "disk": step - 10}
            entries.append({"event": "checkpoint", "step": step, "complete": complete})
    lost = {"generation": 1, "ranks": 2, "idle_s": 2.0, "steps_again": 0, "lost": [2], "joined": []}
    entries.append({"event": "generation", "step": num_steps, **lost})
    if ends:
        entries.append({"event": "ended", "step": num_steps})
    lines = [
        json.dumps({"at_s": now_s - len(entries) + i, **entry}) for i, entry in enumerate(entries)
    ]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")


def page_of(folder: Path) -> str:
    return render(read_story(folder))


def test_the_page_shows_the_run_and_escapes_names(tmp_path):
    write_run(tmp_path / "run")
    output = tmp_path / "run.html"
    assert main(["report", str(tmp_path / "run"), "--output", str(output)]) == 0
    page = output.read_text()
    assert EVIL not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    for words in (
        "Ended as planned",
        "rank 0: layers 0 to 3",
        "rank 1: layer 0",
        "lost [2]",
        "1.4 GiB in use, 1.12 pred",
    ):
        assert words in page
    for title in ("Seconds of an iteration", "Tokens per second", "Share of an iteration"):
        assert title in page
    # Nothing is loaded from elsewhere.
    assert not re.search(r"(src|href)=\"(?!data:)", page)


def test_every_figure_is_well_formed_and_within_its_frame(tmp_path):
    write_run(tmp_path)
    figures = re.findall(r"<svg viewBox.*?</svg>", page_of(tmp_path), flags=re.DOTALL)
    assert len(figures) == 7
    for figure in figures:
        left, top, width, height = map(float, ET.fromstring(figure).attrib["viewBox"].split())
        for points in re.findall(r'points="([^"]+)"', figure):
            for point in points.split():
                x, y = map(float, point.split(","))
                assert left <= x <= left + width
                assert top <= y <= top + height


def test_it_tells_running_and_dead_runs_apart(tmp_path):
    write_run(tmp_path / "dead", ends=False)
    write_run(tmp_path / "running", ends=False, now_s=time.time())
    with (tmp_path / "running" / "events.jsonl").open("a") as file:
        file.write('{"event": "iterat')  # A torn line is left out.
    assert "the run has died" in page_of(tmp_path / "dead")
    assert "Still running" in page_of(tmp_path / "running")


def test_recordings_of_any_job_and_operation_traces_are_shown(tmp_path):
    times = [0.5] * 60 + [0.9] * 60
    (tmp_path / "times.jsonl").write_text("\n".join(map(str, times)))
    columns = Planted(slow_rank=(2, 2.0)).columns()
    rows = zip(*(values.tolist() for values in columns.values()), strict=True)
    lines = [json.dumps(dict(zip(columns, row, strict=True))) for row in rows]
    (tmp_path / "operations.jsonl").write_text("\n".join(lines))
    page = page_of(tmp_path)
    assert "slowdown" in page
    assert "rank 2" in page


def test_the_files_of_all_ranks_are_one_trace(tmp_path):
    columns = Planted(slow_rank=(2, 2.0)).columns()
    rows = list(zip(*(values.tolist() for values in columns.values()), strict=True))
    (tmp_path / "operations").mkdir()
    for rank in range(16):
        own = [dict(zip(columns, row, strict=True)) for row in rows]
        lines = "".join(json.dumps(row) + "\n" for row in own if row["rank"] == rank)
        path = tmp_path / "operations" / f"operations-rank{rank}.jsonl.gz"
        path.write_bytes(gzip.compress(lines.encode())[: None if rank else -9])  # One is torn.
    story = read_story(tmp_path)
    (verdict,) = story.verdicts
    assert "rank 2, " in verdict


def test_a_folder_without_logs_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no event log" in capsys.readouterr().err


def test_100_000_steps_take_five_seconds_and_three_megabytes(tmp_path):
    write_run(tmp_path, num_steps=100_000)
    began = time.process_time()
    page = page_of(tmp_path)
    assert time.process_time() - began < 5.0
    assert len(page.encode()) < 3e6


def run_page(folder: Path) -> str:
    write_run(folder / "run")
    return page_of(folder / "run")


def plan_page(folder: Path) -> str:
    plan = ParallelPlan.even(world_size=4, num_layers=32, num_stages=2)
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=4),))
    model = replace(ModelSpec.load("llama-7b"), name="<script>alert(1)</script>")
    cost = RooflineCost(cluster, model)
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
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={profile}", "--enable-logging=stderr", "--v=0"]
    command += [f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    assert picture.stat().st_size > 10_000
