"""Train a small language model on real text with three processes in an asymmetric plan.

Pipeline 0 is one rank with all layers, pipeline 1 two ranks with one layer and three. Run it::

    python examples/train_text.py            # three processes on this machine
    python examples/train_text.py --single   # the same module under plain Lightning, to compare

It trains on the sources of Python's standard library, validates, writes a checkpoint that plain
Lightning reads, and lets the trained model write a few lines. Nothing in `TextLM` or in the data
module knows about plans.
"""

import argparse
import math
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from text_data import END_OF_TEXT, VOCAB_SIZE, PythonSourceData, decode
from torch import Tensor

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.models import (
    HeteroLM,
    LMConfig,
    PackedBatch,
    pack_samples,
    packed_cross_entropy,
)

DEFAULT_PLAN = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 4]}]},
        {"stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 4]}]},
    ]
}
PROMPT = "def read_"


class TextLM(L.LightningModule):
    """Language model on packed batches, with AdamW and a warm-up followed by a cosine."""

    def __init__(
        self, *, model: dict[str, Any], learning_rate: float, warmup_steps: int, num_steps: int
    ) -> None:
        """Build the model.

        Args:
            model: Fields of `LMConfig`; a plain dict, so that the checkpoint needs no pickle.
            learning_rate: Peak learning rate.
            warmup_steps: Steps of linear warm-up.
            num_steps: Steps after which the learning rate has come down to a tenth.
        """
        super().__init__()
        self.save_hyperparameters()
        self.model = HeteroLM(LMConfig(**model))

    def training_step(self, batch: PackedBatch) -> Tensor:
        """Return the mean loss over the batch's target tokens."""
        loss = self._loss(batch)
        self.log("train_loss", loss, prog_bar=True, batch_size=batch.num_target_tokens)
        return loss

    def validation_step(self, batch: PackedBatch) -> None:
        """Log the mean loss over the validation text."""
        loss = self._loss(batch)
        self.log("val_loss", loss, prog_bar=True, batch_size=batch.num_target_tokens)

    def configure_optimizers(self) -> dict[str, Any]:
        """Decay matrices, not norms; move the learning rate once a step."""
        parameters = list(self.parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=self.hparams["learning_rate"],
            betas=(0.9, 0.95),
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._learning_rate_factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    @torch.inference_mode()
    def generate(self, prompt: str, *, num_tokens: int, temperature: float = 0.7) -> str:
        """Return the prompt and up to `num_tokens` bytes that the model adds to it."""
        generator = torch.Generator().manual_seed(0)
        tokens = list(prompt.encode())
        for _ in range(num_tokens):
            logits = self(pack_samples([tokens]))[-1].float().cpu()
            probabilities = (logits / temperature).softmax(-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
            if tokens[-1] == END_OF_TEXT:
                break
        return decode(tokens)

    def forward(self, batch: PackedBatch) -> Tensor:
        """Return logits, (tokens, vocabulary)."""
        batch = batch.to(self.device)
        logits: Tensor = self.model(
            batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen
        )
        return logits

    def _loss(self, batch: PackedBatch) -> Tensor:
        logits = self.model(batch.input_ids, batch.cu_seqlens, batch.position_ids, batch.max_seqlen)
        return packed_cross_entropy(logits, batch.labels)

    def _learning_rate_factor(self, step: int) -> float:
        warmup_steps, num_steps = self.hparams["warmup_steps"], self.hparams["num_steps"]
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, num_steps - warmup_steps))
        return 0.55 + 0.45 * math.cos(math.pi * progress)


class Throughput(L.Callback):
    """Count tokens and losses, and show tokens/s in the progress bar.

    A rank sees its own pipeline's batch; the other pipelines' are taken to be like it on average.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.flops = 0
        self.seconds = 0.0
        self.losses: list[float] = []
        self._batch_start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        """Start the clock: validation and checkpoints between batches don't count."""
        self._batch_start = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: PackedBatch,
        batch_idx: int,
    ) -> None:
        """Add the batch that all pipelines have just finished."""
        self.seconds += time.perf_counter() - self._batch_start
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", {"num_replicas": 1})
        self.num_tokens += batch.num_tokens * sampler["num_replicas"]
        flops = pl_module.model.config.spec.step_flops(batch.lengths)
        self.flops += flops * sampler["num_replicas"]
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        self.log("tokens/s", self.tokens_per_s, prog_bar=True, batch_size=1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all pipelines per second of training, since the start."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def parse_arguments() -> argparse.Namespace:
    """Return the command line's options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plan", type=Path, help="JSON file with another plan")
    parser.add_argument("--single", action="store_true", help="one process, plain Lightning")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps")
    parser.add_argument("--batch", type=int, default=6, help="samples per pipeline and step")
    parser.add_argument("--microbatches", type=int, default=3, help="micro-batches per pipeline")
    parser.add_argument("--context", type=int, default=512, help="tokens kept of a sample")
    parser.add_argument("--hidden", type=int, default=128, help="width of the model")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--precision", default="32-true", help="as in Lightning's Trainer")
    parser.add_argument("--accelerator", default="cpu", help="as in Lightning's Trainer")
    parser.add_argument("--sample-tokens", type=int, default=240, help="bytes to write at the end")
    parser.add_argument("--out", type=Path, default=Path("outputs/train_text"), help="checkpoints")
    return parser.parse_args()


def build_model(arguments: argparse.Namespace, num_layers: int) -> TextLM:
    """Return the module with initial weights."""
    return TextLM(
        model={
            "vocab_size": VOCAB_SIZE,
            "hidden_size": arguments.hidden,
            "num_layers": num_layers,
            "num_heads": 4,
            "num_kv_heads": 2,
        },
        learning_rate=arguments.learning_rate,
        warmup_steps=max(1, arguments.steps // 10),
        num_steps=arguments.steps,
    )


def build_trainer(
    arguments: argparse.Namespace, plan: ParallelPlan, throughput: Throughput
) -> L.Trainer:
    """Return a Trainer: under the plan, or plain with `--single`."""
    devices = 1 if arguments.single else len(plan.ranks)
    if arguments.accelerator == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
    strategy = (
        "auto"
        if arguments.single
        else HeteroStrategy(plan=plan, num_microbatches=arguments.microbatches)
    )
    checkpoint = ModelCheckpoint(
        dirpath=arguments.out,
        filename="step{step}",
        auto_insert_metric_name=False,
        monitor="val_loss",
    )
    return L.Trainer(
        strategy=strategy,
        accelerator=arguments.accelerator,
        devices=devices,
        precision=arguments.precision,
        max_steps=arguments.steps,
        max_epochs=1000,  # max_steps ends the run
        val_check_interval=max(1, arguments.steps // 2),
        check_val_every_n_epoch=None,
        limit_val_batches=8,
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[throughput, checkpoint],
        logger=False,
        enable_model_summary=False,
    )


@rank_zero_only
def report(
    trainer: L.Trainer,
    model: TextLM,
    plan: ParallelPlan,
    throughput: Throughput,
    *,
    single: bool,
    num_sample_tokens: int,
) -> None:
    """Print what the run did, and lines by the model read back from its checkpoint."""
    path = Path(trainer.checkpoint_callback.best_model_path)
    trained = TextLM.load_from_checkpoint(path, map_location="cpu").eval()
    num_parameters = sum(parameter.numel() for parameter in trained.parameters())
    first, last = throughput.losses[0], statistics.fmean(throughput.losses[-10:])
    print("\nOne process, plain Lightning" if single else f"\nThe plan\n{plan}")
    print(f"\nparameters  {num_parameters:,} in {model.hparams['model']['num_layers']} layers")
    print(f"trained     {trainer.global_step} steps, about {throughput.num_tokens:,} tokens")
    print(
        f"speed       {throughput.tokens_per_s:,.0f} tokens/s, "
        f"{throughput.flops / throughput.seconds / 1e9:.1f} GFLOP/s"
    )
    print(f"train loss  {first:.3f} -> {last:.3f} nats per byte (mean of the last steps)")
    print(f"val loss    {float(trainer.callback_metrics['val_loss']):.3f}")
    print(f"checkpoint  {path}, read back by TextLM.load_from_checkpoint")
    print(f"\nIt writes, after {PROMPT!r}:\n")
    print(trained.generate(PROMPT, num_tokens=num_sample_tokens))
    print(
        "\nTry next\n"
        "  python examples/train_text.py --single       the same module, plain Lightning\n"
        "  python examples/train_text.py --plan FILE    another plan: JSON, as ParallelPlan.save\n"
        "                                               writes it; any split of layers and ranks\n"
        "  python examples/train_text.py --steps 1000   a longer run, lower loss"
    )


def main() -> None:
    """Train, validate, save, read back, write."""
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 on torch 2.13
    plan = (
        ParallelPlan.from_dict(DEFAULT_PLAN)
        if arguments.plan is None
        else ParallelPlan.load(arguments.plan)
    )
    L.seed_everything(0, verbose=False)
    model = build_model(arguments, plan.num_layers)
    throughput = Throughput()
    trainer = build_trainer(arguments, plan, throughput)
    # One process takes the samples of all pipelines, so that both ways train on equal batches.
    samples = arguments.batch * (plan.num_pipelines if arguments.single else 1)
    data = PythonSourceData(context_length=arguments.context, samples_per_batch=samples)
    trainer.fit(model, datamodule=data)
    report(
        trainer,
        model,
        plan,
        throughput,
        single=arguments.single,
        num_sample_tokens=arguments.sample_tokens,
    )


if __name__ == "__main__":
    main()
