"""What imports what: planning needs no torch, and `strategy="hetero"` is known once both are there.

Each case is a process of its own, because none forgets what it has imported.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import lightning_hetero

pytestmark = pytest.mark.dist

PACKAGE = Path(lightning_hetero.__file__).parent


def run(script: str) -> str:
    """Return what a script prints."""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.parametrize(
    "imports",
    [
        "lightning_hetero; lightning_hetero.ParallelPlan",
        "lightning_hetero.core.plan",
        "lightning_hetero.planner",
        "lightning_hetero.assign",
        "lightning_hetero.simulator",
        "lightning_hetero.cli.plan",
    ],
)
def test_what_plans_and_simulates_imports_neither_torch_nor_lightning(imports):
    heavy = "[name for name in ('torch', 'lightning') if name in sys.modules]"
    assert run(f"import sys, {imports}; print({heavy})") == "[]"


def test_no_room_has_more_files_than_a_reader_takes_in():
    rooms = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert rooms
    assert {room.name: count for room, count in rooms.items() if count > 20} == {}


CASES = [
    "import lightning as L\nimport lightning_hetero",
    "import lightning.pytorch as L\nimport lightning_hetero.core.plan",
    "from lightning_hetero import HeteroStrategy\nimport lightning as L",
    "import lightning_hetero\nimport lightning as L\nlightning_hetero.ParallelPlan",
]
EACH_IN_A_FORK = """
import os, sys, warnings
# All that Lightning needs, but neither it nor this package.
import torch, torch._dynamo, torchmetrics

assert not {"lightning", "lightning_hetero"} & sys.modules.keys()
warnings.simplefilter("ignore")
for number, case in enumerate(%r):
    if os.fork() == 0:
        exec(case)
        trainer = L.Trainer(strategy="hetero", accelerator="cpu", devices=1, logger=False)
        print(f"case {number}: {type(trainer.strategy).__name__}", flush=True)
        os._exit(0)
    os.wait()
"""


def test_the_strategy_has_a_name_once_lightning_and_the_package_are_imported():
    lines = run(EACH_IN_A_FORK % CASES).splitlines()
    for number, case in enumerate(CASES):
        assert f"case {number}: HeteroStrategy" in lines, case
