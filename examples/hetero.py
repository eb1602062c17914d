"""Everything at once under LightningCLI: see hetero.yaml, which says what runs.

::

    python examples/hetero.py fit --config examples/hetero.yaml
    python examples/hetero.py fit --help
"""

import warnings

from lightning.pytorch.cli import LightningCLI
from text_data import PythonSourceDataset
from train_text import TextLM

from lightning_hetero.data import HeteroDataModule


class SourceData(HeteroDataModule):
    """The sources of Python's standard library, in samples of very different lengths."""

    def __init__(
        self, *, context_length: int, tokens_per_step: int, max_files: int = 100, seed: int = 0
    ) -> None:
        """Read the files.

        Args:
            context_length: Tokens to keep of a longer sample.
            tokens_per_step: Tokens of an iteration on all pipelines together.
            max_files: Files to read.
            seed: Seed of the shuffle.
        """
        train, val = (
            PythonSourceDataset(split, context_length=context_length, max_files=max_files)
            for split in ("train", "val")
        )
        super().__init__(
            train,
            val,
            tokens_per_step=tokens_per_step,
            context_length=context_length,
            lengths=[len(sample) for sample in train.samples],
            seed=seed,
        )


def main() -> None:
    """Run what the command line asks for."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 on torch 2.13
    LightningCLI(TextLM, SourceData, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
