"""What imports what: planning needs no torch, and `strategy="hetero"` is known once both are there.

Each case is a script of its own, because a process never forgets what it has imported.
"""

import subprocess
import sys

import pytest


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


TRAINER = "L.Trainer(strategy='hetero', accelerator='cpu', devices=1, logger=False)"
QUIET = "import warnings; warnings.simplefilter('ignore')\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import lightning as L\nimport lightning_hetero",
        "import lightning as L\nfrom lightning_hetero import HeteroDataModule",
        "import lightning.pytorch as L\nimport lightning_hetero.core.plan",
        "from lightning_hetero import HeteroStrategy\nimport lightning as L",
        "from lightning_hetero import HeteroDataModule\nimport lightning as L",
        "from lightning_hetero.callbacks import RunLog\nimport lightning as L",
        "import lightning_hetero\nimport lightning as L\nlightning_hetero.ParallelPlan",
    ],
)
def test_the_strategy_has_a_name_once_lightning_and_the_package_are_imported(imports):
    script = f"{QUIET}{imports}\nprint(type({TRAINER}.strategy).__name__)"
    assert run(script).splitlines()[-1] == "HeteroStrategy"
