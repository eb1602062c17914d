"""What a user writes around a Hugging Face model with packed batches, and runs of it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from lightning_hetero.models import PackedBatch, pack_samples
from lightning_hetero.models.huggingface import (
    load_pretrained,
    packed_inputs,
    use_packed_attention,
)
from tests.runtime.huggingface_runs import VOCABULARY, auto_class, make_model
from tests.toy import quiet

SEED = 11
NUM_SAMPLES = 24


@dataclass(frozen=True, kw_only=True)
class PackedCase:
    """What is trained and how; without a plan, on a single device under plain Lightning."""

    model: str
    plan: dict[str, Any] | None = None
    world_size: int = 1
    source: str = "cpu"
    """Built "cpu", or "meta" and drawn there, or read from the "folder"."""
    folder: Path | None = None
    """A saved model to begin with; what comes out is written beside it."""
    batch_size: int = 4
    sequence_parallel: bool = False

    def on_single_device(self) -> "PackedCase":
        assert self.plan is not None
        size = self.batch_size * len(self.plan["pipelines"])
        return replace(self, plan=None, world_size=1, batch_size=size)


class PackedModule(L.LightningModule):
    """Trains a causal or a masked language model."""

    def __init__(self, case: PackedCase) -> None:
        super().__init__()
        self.case = case
        self.model: Any = None
        self.losses: list[float] = []
        self.initial: dict[str, np.ndarray] = {}

    def configure_model(self) -> None:
        if self.model is not None:
            return
        kind = auto_class(self.case.model)
        if self.case.source == "folder" and self.case.plan is not None:
            self.model = load_pretrained(self.case.folder, kind)
        elif self.case.source == "folder":
            self.model = kind.from_pretrained(self.case.folder)
        else:
            with torch.device(self.case.source):
                self.model = make_model(self.case.model)
        use_packed_attention(self.model)

    def num_target_tokens(self, batch: PackedBatch) -> int:
        """Return what the loss is a mean over: a masking model has targets of its own."""
        labels = masked(batch).labels if self.case.model == "bert" else batch.labels
        return int((labels != -100).sum())

    def training_step(self, batch: PackedBatch) -> Tensor:
        if self.case.model == "bert":
            batch = masked(batch)
        loss: Tensor = self.model(**packed_inputs(batch, labels=True)).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def on_train_start(self) -> None:
        self.initial = arrays(self.trainer.strategy.lightning_module_state_dict())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(4)
        samples = [
            torch.randint(3, VOCABULARY, (2 + index * 7 % 13,), generator=generator)
            for index in range(NUM_SAMPLES)
        ]
        return DataLoader(samples, batch_size=self.case.batch_size, collate_fn=pack_samples)


def masked(batch: PackedBatch) -> PackedBatch:
    """Hide a third of the tokens, which become the targets."""
    hidden = (batch.input_ids + batch.position_ids) % 3 == 0
    return replace(
        batch,
        input_ids=batch.input_ids.masked_fill(hidden, 2),
        labels=batch.input_ids.masked_fill(~hidden, -100),
    )


@dataclass(frozen=True, kw_only=True)
class PackedOutcome:
    """What a rank knows after a run."""

    losses: list[float]
    initial: dict[str, np.ndarray]
    """Weights before the first step, on rank 0."""
    after: dict[str, np.ndarray]
    num_bytes_read: int


def arrays(state: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: value.detach().numpy().copy() for name, value in state.items()}


def train(rank: int, case: PackedCase) -> PackedOutcome:
    """Train a case on one of its ranks; with a folder, also save what came out."""
    L.seed_everything(SEED, verbose=False)
    module = PackedModule(case)
    strategy: dict[str, Any] = {"devices": 1}
    if case.plan is not None:
        plan = ParallelPlan.from_dict(case.plan)
        hetero = HeteroStrategy(
            plan,
            num_microbatches=2,
            sequence_parallel=case.sequence_parallel,
            whole_after_run=True,
        )
        strategy = {"strategy": hetero, "devices": case.world_size}
    trainer = L.Trainer(**quiet(max_epochs=1), **strategy, use_distributed_sampler=False)
    trainer.fit(module)
    if case.folder is not None and case.plan is not None:
        trainer.save_checkpoint(case.folder.parent / "trained.ckpt")
        if rank == 0:
            module.model.save_pretrained(case.folder.parent / "trained")
    source = getattr(module.model, "weight_source", None)
    return PackedOutcome(
        losses=module.losses,
        initial=module.initial,
        after=arrays(module.state_dict()),
        num_bytes_read=0 if source is None else source.num_bytes_read,
    )


def train_unlike(rank: int, case: PackedCase) -> None:
    """Let rank 1 build its module on the meta device and rank 0 on CPU."""
    train(rank, replace(case, source="meta" if rank else "cpu"))
