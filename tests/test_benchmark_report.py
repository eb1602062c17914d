"""Laws of the benchmarks' report: nothing is lost, and what got worse is said."""

import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as benchmarks
from tests.benchmarks.harness import Row
from tests.benchmarks.report import Report

STEP = Row(
    name="step",
    ours=1.0,
    peer=2.0,
    unit="s",
    target=1.05,
    better="lower",
    kind="measured",
    value=0.5,
    note="the peer",
)
SPEED_UP = replace(STEP, name="speed-up", value=2.0, target=1.5, better="higher")


def report(*rows: Row) -> Report:
    return Report(date="2030-01-01", machine="here", rows=rows)


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    report(STEP, SPEED_UP).save(path)
    assert Report.load(path) == report(STEP, SPEED_UP)


@pytest.mark.parametrize(
    ("value", "words"), [(0.54, "nothing got worse"), (0.6, "worse"), (1.2, "missed")]
)
def test_a_ratio_to_stay_below_its_target_is_worse_if_it_rises(value: float, words: str) -> None:
    lines = report(replace(STEP, value=value)).compare(report(STEP))
    assert words in lines[-1]


def test_a_ratio_to_reach_its_target_is_worse_if_it_falls() -> None:
    better = report(replace(SPEED_UP, value=4.0))
    assert "nothing got worse" in better.compare(report(SPEED_UP))[0]
    assert report(SPEED_UP).compare(better)[1:] == ["  worse   speed-up: 4 → 2"]


def test_rows_that_are_missing_are_counted() -> None:
    assert report(STEP).compare(report(STEP, SPEED_UP))[1:] == [
        "  1 rows of then weren't measured now"
    ]


def test_a_benchmark_that_fails_loses_no_row_of_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> list[Row]:
        raise RuntimeError("no such luck")

    runs = {"planner": lambda: [STEP], "packing": fail}
    names = [path.stem for path in Path(benchmarks.__file__).parent.glob("bench_*.py")]
    for name in names:
        topic = name.removeprefix("bench_")
        module = types.SimpleNamespace(run=runs.get(topic, list))
        monkeypatch.setitem(sys.modules, f"tests.benchmarks.{name}", module)
    path = tmp_path / "figures.json"
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--json", str(path)])
    assert benchmarks.main() == 1
    captured = capsys.readouterr()
    assert "no such luck" in captured.err
    assert "failed: bench_packing" in captured.out
    assert "the peer" in captured.out
    kept = Report.load(path)
    assert kept.rows == (STEP,)
    assert kept.failed == ("bench_packing",)
