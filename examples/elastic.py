r"""Train a small language model on nodes that come and go.

`examples/elastic.sh` starts three nodes on this machine, kills one and brings it back. On real
nodes start this on each of them, with the address of one that stays::

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=1:4 --nproc-per-node=1 \
        --max-restarts=100 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 examples/elastic.py

Whatever is killed, training goes on from the newest checkpoint that any node still holds, under a
plan for the nodes that are there. Nothing here says how many they are.
"""

import argparse
import time
import warnings
from pathlib import Path

import lightning as L
from text_data import VOCAB_SIZE, PythonSourceDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from train_text import TextLM

from lightning_hetero import HeteroStrategy
from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint
from lightning_hetero.models import pack_samples


class Progress(L.Callback):
    """Print the loss now and then, and keep a pace at which a run can be watched."""

    def __init__(self, pace_s: float) -> None:
        self.pace_s = pace_s

    def on_train_batch_start(self, *_: object) -> None:
        """Wait a moment."""
        time.sleep(self.pace_s)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object
    ) -> None:
        """Print every tenth step on rank 0."""
        if trainer.is_global_zero and trainer.global_step % 10 == 0:
            loss = float(trainer.callback_metrics["train_loss"])
            print(f"step {trainer.global_step}: loss {loss:.4f}, {trainer.world_size} ranks")


def main() -> None:
    """Train until the last step, whatever happens on the way."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all")
    parser.add_argument(
        "--out", default="outputs/elastic/remote", help="folder or URL that all nodes reach"
    )
    parser.add_argument("--disk", type=Path, help="folder on this node's own disk")
    parser.add_argument("--in-place", action="store_true", help="go on without lost ranks")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    parser.add_argument("--batch", type=int, default=8, help="samples of a rank in an iteration")
    parser.add_argument("--pace", type=float, default=0.0, help="seconds to wait before each step")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*(LeafSpec|set_vital).*")
    L.seed_everything(0, verbose=False)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": arguments.hidden}
    sizes |= {"num_layers": 4, "num_heads": 4}
    model = TextLM(model=sizes, learning_rate=3e-3, warmup_steps=20, num_steps=arguments.steps)
    checkpoint = LayerwiseCheckpoint(
        arguments.out, every_n_train_steps=10, local_dir=arguments.disk, replicas=2
    )
    progress = Progress(arguments.pace)
    trainer = L.Trainer(
        strategy=HeteroStrategy(),
        accelerator="cpu",
        max_steps=arguments.steps,
        callbacks=[checkpoint, ElasticRestart(in_place=arguments.in_place), progress],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # A stateful loader goes on inside an epoch. An iteration takes a batch of each rank there is.
    dataset = PythonSourceDataset("train", context_length=128)
    loader = StatefulDataLoader(
        dataset, batch_size=arguments.batch, shuffle=True, collate_fn=pack_samples
    )
    trainer.fit(model, loader)


if __name__ == "__main__":
    main()
