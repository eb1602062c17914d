"""Everything at once under LightningCLI: see hetero.yaml, which says what runs.

::

    python examples/hetero.py fit --config examples/hetero.yaml
    python examples/hetero.py fit --help
"""

import warnings

from lightning.pytorch.cli import LightningCLI
from train_text import TextLM

from lightning_hetero.data import HeteroDataModule


def main() -> None:
    """Run what the command line asks for."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 on torch 2.13
    LightningCLI(TextLM, HeteroDataModule, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
