"""The run of hetero.yaml composed in Python, with callbacks of one's own between this package's.

::

    python examples/composed.py                                # checkpoints in outputs/composed
    python examples/composed.py --reverse                      # callbacks in the opposite order
    python examples/composed.py --store s3://bucket/run --endpoint-url http://127.0.0.1:9000

Run it twice: the second run goes on from the newest checkpoint, with the state of every callback
that has one. A store is a folder that all nodes reach, or any URL that fsspec knows; for S3 and
what speaks like it, keys and region come from the usual variables (AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_DEFAULT_REGION).
"""

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning as L
from hetero import SourceData
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_only
from text_data import VOCAB_SIZE
from train_text import TextLM

from lightning_hetero import (
    ElasticRestart,
    HeteroStrategy,
    LayerwiseCheckpoint,
    RunMetrics,
    StragglerMonitor,
)
from lightning_hetero.testing import EmulatedDevices


class Diary(L.Callback):
    """A callback as any user writes one: it knows nothing of plans, pipelines or slices.

    What a hook is given is the same on every rank: the step's loss over all pipelines, what was
    logged, the learning rate. Its state is part of every checkpoint and comes back with it.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.num_runs = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Count the processes' lives; the state of those before has been put back."""
        self.num_runs += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any
    ) -> None:
        """Note the loss."""
        self.losses.append(float(outputs["loss"]))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"losses": self.losses, "num_runs": self.num_runs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what a checkpoint kept."""
        self.losses, self.num_runs = list(state_dict["losses"]), state_dict["num_runs"]

    @rank_zero_only
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Say what was seen."""
        print(
            f"\ndiary       {len(self.losses)} steps in {self.num_runs} runs, "
            f"loss {self.losses[0]:.3f} -> {self.losses[-1]:.3f}"
        )


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps in all")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of an iteration")
    parser.add_argument("--context", type=int, default=1024, help="tokens kept of a sample")
    parser.add_argument("--files", type=int, default=100, help="files to read")
    parser.add_argument(
        "--slowdowns",
        type=float,
        nargs="+",
        default=[2, 2, 4, 4],
        help="how many times slower each emulated device is (default: 2 2 4 4)",
    )
    parser.add_argument("--store", help="folder or URL for checkpoints (default: in --out)")
    parser.add_argument(
        "--endpoint-url", help="address of an S3-compatible store that isn't Amazon's"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/composed"), help="folder for files"
    )
    parser.add_argument("--reverse", action="store_true", help="pass the callbacks in reverse")
    return parser.parse_args()


def build_callbacks(arguments: argparse.Namespace) -> list[L.Callback]:
    """Return this package's callbacks, Lightning's and one's own; any order will do.

    Each acts in its own hooks, and Lightning lets those that save come last in every hook, so what
    they save is what all others have left behind.
    """
    endpoint = {"endpoint_url": arguments.endpoint_url} if arguments.endpoint_url else {}
    callbacks = [
        Diary(),
        EmulatedDevices(arguments.slowdowns),  # leave out on real devices
        RunMetrics(),
        LearningRateMonitor("step"),
        LayerwiseCheckpoint(
            arguments.store or arguments.out / "checkpoints",
            every_n_train_steps=arguments.every,
            storage_options=endpoint,
        ),
        ElasticRestart(),
        EarlyStopping("val_loss", patience=10),
        StragglerMonitor(),
        ModelCheckpoint(arguments.out / "best", monitor="val_loss", save_weights_only=True),
        RichProgressBar(),
    ]
    return callbacks[::-1] if arguments.reverse else callbacks


def main() -> None:
    """Train, or go on with training."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 on torch 2.13
    L.seed_everything(0, verbose=False)
    model = TextLM(
        model={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": arguments.hidden,
            "num_layers": 6,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        learning_rate=3e-3,
        warmup_steps=6,
        num_steps=60,  # of the learning rate's way down, wherever this run ends
    )
    trainer = L.Trainer(
        strategy=HeteroStrategy(num_candidate_plans=4),
        accelerator="cpu",
        devices=len(arguments.slowdowns),
        callbacks=build_callbacks(arguments),
        logger=CSVLogger(arguments.out, name="logs"),
        max_steps=arguments.steps,
        max_epochs=1000,  # max_steps ends the run
        val_check_interval=max(1, arguments.every),
        check_val_every_n_epoch=None,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        enable_model_summary=False,
        default_root_dir=arguments.out,
    )
    data = SourceData(
        context_length=arguments.context,
        tokens_per_step=arguments.tokens,
        max_files=arguments.files,
    )
    trainer.fit(model, data)


if __name__ == "__main__":
    main()
