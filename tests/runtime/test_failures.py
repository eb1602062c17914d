import os
import signal
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.processes import SILENT, ProcessFailed, ProcessPool
from tests.toy import Block, TokenRows, ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.dist


ASYMMETRIC = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 3]}]},
        {"stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 3]}]},
    ]
}


class ReturnsNone(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class ReturnsNoLoss(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"accuracy": super().training_step(batch, batch_idx)}


class CallsTwice(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch) + self.loss(batch)


class NeverCalls(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model.head.weight.sum()


class Detached(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class Manual(ToyModule):
    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        self.automatic_optimization = False


class OwnBackward(ToyModule):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward()


class MasksGradients(ToyModule):
    """One device would train only some rows of a parameter."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        next(self.parameters()).register_hook(lambda gradient: gradient * 0)


class MasksGradientsLater(ToyModule):
    def on_train_start(self) -> None:
        next(self.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


class NoLayers(L.LightningModule):
    def __init__(self, options: ToyOptions) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net(torch.randn(2, 4)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class RaisesOnLastStage(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and self.global_rank == 2:
            raise ValueError("a bug of the user's")
        return loss


class KilledInStep(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.global_rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


class Freezes(ToyModule):
    """Stops a rank as a paused machine does: its connections stay, and nothing answers."""

    def __init__(self, options: ToyOptions, frozen: int, moment: str) -> None:
        super().__init__(options)
        self.frozen, self.moment = frozen, moment

    def freeze_at(self, moment: str) -> None:
        if moment == self.moment and self.global_rank == self.frozen:
            os.kill(os.getpid(), signal.SIGSTOP)

    def setup(self, stage: str) -> None:
        self.freeze_at("set-up")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.freeze_at("step")
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        self.freeze_at("end")


class ComputesBetweenLayers(ToyModule):
    def loss(self, batch: Any) -> Any:
        ids, labels = batch
        model = self.model
        x = model.wte(ids) + model.wpe[: ids.shape[1]]
        for block in model.blocks:
            x = block(x) * 1.5
        logits = model.head(model.ln_f(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class BlockWithMemory(Block):
    def forward(self, x: Any, first: Any = None) -> Any:
        return super().forward(x) + first


class GivesEmbeddingToLayers(ToyModule):
    """Every layer sees the embedding, which a stage in the middle doesn't have."""

    def __init__(self, options: ToyOptions) -> None:
        super().__init__(options)
        self.model.blocks = torch.nn.ModuleList([BlockWithMemory(16) for _ in range(3)])

    def loss(self, batch: Any) -> Any:
        ids, labels = batch
        model = self.model
        x = first = model.wte(ids) + model.wpe[: ids.shape[1]]
        for block in model.blocks:
            x = block(x, first)
        logits = model.head(model.ln_f(x))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class RaggedRows(TokenRows):
    def __getitem__(self, index: int) -> Any:
        return self.ids[index], self.labels[index][: 1 + index % 2]


def ragged_collate(rows: list[Any]) -> Any:
    return torch.stack([row[0] for row in rows]), torch.cat([row[1] for row in rows])


def ragged_loader(num_rows: int, batch_size: int) -> DataLoader[Any]:
    return DataLoader(RaggedRows(num_rows), batch_size=batch_size, collate_fn=ragged_collate)


def fit(
    rank: int, module: type, plan: dict[str, Any], world_size: int, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    strategy = HeteroStrategy(
        plan=ParallelPlan.from_dict(plan),
        num_microbatches=2,
        timeout=timedelta(seconds=options.pop("timeout_s", 60)),
    )
    if "plugins" in options:
        options["plugins"] = options["plugins"].make()
    make_loader = ragged_loader if options.pop("ragged", False) else loader
    trainer = L.Trainer(strategy=strategy, **quiet(devices=world_size, max_steps=4, **options))
    trainer.fit(module(ToyOptions()), make_loader(64, 4))


def fit_and_freeze(rank: int, frozen: int, moment: str) -> None:
    torch.manual_seed(0)
    strategy = HeteroStrategy(
        plan=ParallelPlan.from_dict(ASYMMETRIC), num_microbatches=2, timeout=timedelta(seconds=3)
    )
    trainer = L.Trainer(strategy=strategy, **quiet(devices=3, max_steps=4))
    trainer.fit(Freezes(ToyOptions(), frozen, moment), loader(64, 4))


def run_beside_a_frozen_rank(pool: ProcessPool, frozen: int, moment: str) -> dict[int, str]:
    """Return how the others failed; they may as well end as if nothing was wrong."""
    failures: dict[int, str] = {}
    try:
        # Seconds are enough; a machine under load gets more. Without an end it would be for ever.
        pool.run(fit_and_freeze, 3, frozen, moment, timeout_s=60.0, frozen=frozen)
    except ProcessFailed as error:
        failures = error.failures
    assert SILENT not in failures.values()
    return failures


def failures_of(
    pool: ProcessPool,
    module: type,
    plan: dict[str, Any] | None = None,
    world_size: int = 3,
    **options: Any,
) -> dict[int, str]:
    with pytest.raises(ProcessFailed) as caught:
        pool.run(fit, world_size, module, plan or ASYMMETRIC, world_size, options)
    return caught.value.failures


@pytest.mark.parametrize(
    ("module", "options", "expected"),
    [
        (ReturnsNone, {}, "training_step returned None"),
        (ReturnsNoLoss, {}, "training_step returned dict; it must return the loss"),
        (CallsTwice, {}, "calls the model twice"),
        (NeverCalls, {}, "without calling the model's layers"),
        (Detached, {}, "loss without gradients"),
        (Manual, {}, "needs automatic optimization"),
        (OwnBackward, {}, "overrides backward"),
        (MasksGradients, {}, "has a gradient hook"),
        (MasksGradientsLater, {}, "has a gradient hook"),
        (NoLayers, {}, "has no list of layers"),
        (ComputesBetweenLayers, {}, "computes something between layer 0 and layer 1"),
        (RaisesOnLastStage, {}, "a bug of the user's"),
        (ToyModule, {"ragged": True}, "can't be cut into micro-batches"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
def test_bad_input_is_a_clear_error_on_every_rank(
    pool: ProcessPool, module: type, options: dict[str, Any], expected: str
) -> None:
    failures = failures_of(pool, module, **options)
    assert sorted(failures) == [0, 1, 2]
    for text in failures.values():
        assert expected in text


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"pipelines": [{"stages": [{"ranks": [7], "layers": [0, 3]}]}]}, "names rank 7 but 3"),
        (
            {
                "pipelines": [
                    {"stages": [{"ranks": [0], "layers": [0, 3]}]},
                    {"stages": [{"ranks": [0], "layers": [0, 3]}]},
                ]
            },
            "Name each rank once",
        ),
        (
            {
                "pipelines": [
                    {
                        "stages": [
                            {"ranks": [0], "layers": [0, 1]},
                            {"ranks": [1], "layers": [2, 3]},
                        ]
                    }
                ]
            },
            "skips layers",
        ),
        ({"pipelines": [{"stages": [{"ranks": [0], "layers": [0, 5]}]}]}, "the model has 3"),
    ],
)
def test_a_wrong_plan_is_a_clear_error_on_every_rank(
    pool: ProcessPool, plan: dict[str, Any], expected: str
) -> None:
    failures = failures_of(pool, ToyModule, plan)
    assert sorted(failures) == [0, 1, 2]
    for text in failures.values():
        assert expected in text


def test_what_only_the_first_stage_can_compute_is_refused_in_the_middle(pool: ProcessPool) -> None:
    stages = [{"ranks": [rank], "layers": [rank, rank + 1]} for rank in range(3)]
    failures = failures_of(pool, GivesEmbeddingToLayers, {"pipelines": [{"stages": stages}]})
    assert sorted(failures) == [0, 1, 2]
    for text in failures.values():
        assert "Layer 1 takes parameter model.wte.weight" in text


def test_survivors_name_the_rank_that_was_killed(pool: ProcessPool) -> None:
    failures = failures_of(pool, KilledInStep, timeout_s=30)
    assert failures[2] == "the process died"
    for rank in (0, 1):
        assert "PeerError" in failures[rank]
        assert "Rank 2 died or stopped answering" in failures[rank]


def test_a_frozen_rank_0_that_serves_the_store_keeps_nobody(pool: ProcessPool) -> None:
    assert sorted(run_beside_a_frozen_rank(pool, 0, "step")) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frozen", "moment"), [(0, "set-up"), (0, "end"), (1, "step"), (2, "step"), (2, "set-up")]
)
def test_whichever_rank_freezes_whenever_the_others_end(
    pool: ProcessPool, frozen: int, moment: str
) -> None:
    failures = run_beside_a_frozen_rank(pool, frozen, moment)
    assert moment == "end" or len(failures) == 2
