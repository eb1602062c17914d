"""Benchmarks can be run: what they take from the package and from each other is there."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.benchmarks import bench_scale
from tests.benchmarks.lone_rank import Case


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert callable(import_module(f"tests.benchmarks.{name}").run)


@pytest.mark.slow
def test_a_rank_of_many_fits_alone() -> None:
    figures = bench_scale._measure(Case(world_size=8))
    assert all(seconds > 0 for seconds in figures.values())
