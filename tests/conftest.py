import gc
import logging
import os
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

# Before torch is imported: test processes are more than cores, and threads of one wait by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

from tests.callbacks.servers import S3Server
from tests.fast_python import fast_python
from tests.processes import LAUNCHER_VARIABLES, MOST_TRAVEL_ALONE, ProcessPool

# A compiler's helpers would import torch first, for a few kernels.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# How long an example takes says nothing on a machine that others use, too. The suite draws the same
# examples each time, so that it judges a change and not the day; `make explore` draws new ones.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=200)
hypothesis.settings.load_profile("suite")


SECONDS = {"slow": 40.0, "dist": 2.0} | dict.fromkeys(
    ("autoplan", "cli", "examples", "planner"), 2.0
)
"""About what a test with such a mark takes, or one of a room that searches for plans."""


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of pytest-xdist be forks; what tests start is a real `python` for them."""
    if hasattr(config, "workerinput"):
        sys.executable = config.workerinput["python"]
    elif getattr(config.option, "tx", None):
        forked = f"popen//python={fast_python()}"
        config.option.tx = [forked if spec == "popen" else spec for spec in config.option.tx]


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist where the interpreter is."""
    node.workerinput["python"] = sys.executable


@pytest.hookimpl(trylast=True)  # Behind the choice of those that run.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with files that take long: a process takes one at a time, and all end together."""
    seconds: dict[Any, float] = defaultdict(float)
    for item in items:
        names = [item.path.parent.name, *(mark.name for mark in item.iter_markers())]
        seconds[item.path] += max(SECONDS.get(name, 0.05) for name in names)
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """Leave what all modules hold out of each collection of garbage: a tenth of the tests' time."""
    gc.freeze()


def pytest_pycollect_makemodule() -> None:
    """Let what modules draw while they are imported be the same in each run."""
    _seed()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Let a test draw the same numbers in each run, alone or after others."""
    _seed()


def _seed() -> None:
    random.seed(0)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)  # Others' seeds would wait for devices.


@pytest.fixture(autouse=True)
def _nothing_left_of_a_trainer() -> Iterator[None]:
    """Undo what a Trainer in the test's own process leaves: variables and a process group."""
    before = dict(os.environ)
    yield
    for name in LAUNCHER_VARIABLES & os.environ.keys() - before.keys():
        del os.environ[name]
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


@pytest.fixture(scope="session")
def pool() -> Iterator[ProcessPool]:
    """Gloo processes, started once for all tests."""
    processes = ProcessPool(MOST_TRAVEL_ALONE)
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def s3() -> Iterator[S3Server]:
    """One S3 server for all tests; each keeps to a bucket or folder of its own."""
    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    with S3Server() as server:
        yield server
