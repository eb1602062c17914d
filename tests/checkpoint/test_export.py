"""Plain Lightning reads what is exported and gives back what it saved, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_hetero.checkpoint import (
    CheckpointContent,
    CheckpointId,
    CheckpointWriter,
    Peers,
    SliceContent,
    SliceNeed,
    Tier,
    TierKind,
    export_checkpoint,
    recover,
)
from lightning_hetero.core.errors import CheckpointError
from tests.checkpoint.stand_ins import MemoryStore
from tests.checkpoint.states import run_ranks


class Net(LightningModule):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = self.down(self.norm(self.up(batch)))
        return output.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        return torch.optim.AdamW([{"params": rest, "weight_decay": 0.0}, {"params": decay}], lr=0.1)


NAMES = ["up.bias", "norm.weight", "norm.bias", "down.bias", "up.weight", "down.weight"]


def train(folder: Path, max_steps: int, ckpt_path: Path | None = None) -> tuple[Net, Path]:
    torch.manual_seed(1)
    net = Net()
    loader = DataLoader(torch.randn(64, 3, generator=torch.Generator().manual_seed(2)), 4)
    trainer = Trainer(
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader, ckpt_path=ckpt_path)
    path = folder / f"plain-{max_steps}.ckpt"
    trainer.save_checkpoint(path)
    return net, path


def rows_of(
    checkpoint: dict[str, Any], need: SliceNeed
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a slice's rows of a plain checkpoint's weight and of its optimizer state."""
    state = checkpoint["optimizer_states"][0]["state"][NAMES.index(need.parameter)]

    def cut(whole: torch.Tensor) -> torch.Tensor:
        is_whole = tuple(whole.shape) == need.shape
        return whole.narrow(need.dim, need.start, need.stop - need.start) if is_whole else whole

    weight = cut(checkpoint["state_dict"][need.parameter])
    return weight, {name: cut(value) for name, value in state.items()}


def parts_of(checkpoint: dict[str, Any], world_size: int) -> list[CheckpointContent]:
    """Cut a plain checkpoint over ranks, as a sharded run of the same step would hold it."""
    metadata = {k: v for k, v in checkpoint.items() if k not in ("state_dict", "optimizer_states")}
    groups = []
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        groups.append({**group, "params": [NAMES[number] for number in group["params"]]})
    metadata["optimizer_states"] = [{"param_groups": groups}]
    parameters = {k: v for k, v in checkpoint["state_dict"].items() if k in NAMES}
    metadata["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if k not in NAMES}
    slices: list[list[SliceContent]] = [[] for _ in range(world_size)]
    for name, full in parameters.items():
        rows = full.shape[0]
        for rank in range(world_size):
            start, stop = rows * rank // world_size, rows * (rank + 1) // world_size
            if start == stop:
                continue
            weight, state = rows_of(checkpoint, SliceNeed(name, tuple(full.shape), 0, start, stop))
            slices[rank].append(
                SliceContent(
                    parameter=name,
                    unit=0,
                    shape=tuple(full.shape),
                    dim=0,
                    start=start,
                    stop=stop,
                    weight=weight,
                    state=state,
                )
            )
    return [
        CheckpointContent(
            id=CheckpointId(checkpoint["global_step"]),
            global_rank=rank,
            world_size=world_size,
            num_layers=1,
            slices=tuple(slices[rank]),
            metadata=metadata,
        )
        for rank in range(world_size)
    ]


def save(parts: list[CheckpointContent]) -> list[Tier]:
    tiers = [Tier(kind=TierKind.DISK, store=MemoryStore())]

    def action(rank: int, peers: Peers) -> None:
        writer = CheckpointWriter(tiers, node_of_rank=["a"] * len(parts), peers=peers)
        writer.save(parts[rank])
        writer.close()

    run_ranks(len(parts), action)
    return tiers


@pytest.mark.filterwarnings("ignore")
def test_training_goes_on_from_an_export_as_from_lightnings_own_checkpoint(tmp_path: Path) -> None:
    _, plain = train(tmp_path, 5)
    tiers = save(parts_of(torch.load(plain, weights_only=True), 3))
    exported = tmp_path / "exported.ckpt"
    export_checkpoint(tiers, exported)
    loaded = Net.load_from_checkpoint(exported, map_location="cpu", weights_only=True)
    for name, value in torch.load(plain, weights_only=True)["state_dict"].items():
        assert torch.equal(loaded.state_dict()[name], value)
    expected, _ = train(tmp_path, 9, plain)
    found, _ = train(tmp_path, 9, exported)
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value)


def test_state_that_is_not_element_by_element_is_never_cut() -> None:
    def part(rank: int) -> CheckpointContent:
        piece = SliceContent(
            parameter="w",
            unit=0,
            shape=(8, 4),
            dim=0,
            start=4 * rank,
            stop=4 * rank + 4,
            weight=torch.ones(4, 4),
            state={"row": torch.arange(4.0) + rank},
            whole_state={"square": torch.eye(4) + rank},
        )
        return CheckpointContent(
            id=CheckpointId(1), global_rank=rank, world_size=2, num_layers=1, slices=(piece,)
        )

    tiers = save([part(0), part(1)])
    same = recover([SliceNeed("w", (8, 4), 0, 4, 8)], tiers)
    assert same is not None
    assert torch.equal(same.slices[0].state["row"], torch.arange(4.0) + 1)
    assert torch.equal(same.slices[0].state["square"], torch.eye(4) + 1)
    with pytest.raises(CheckpointError, match="ownership='parameter'"):
        recover([SliceNeed("w", (8, 4), 0, 0, 8)], tiers)


def test_an_export_without_a_trainers_metadata_is_refused(tmp_path: Path) -> None:
    piece = SliceContent(
        parameter="w", unit=0, shape=(2,), dim=0, start=0, stop=2, weight=torch.ones(2)
    )
    content = CheckpointContent(
        id=CheckpointId(1), global_rank=0, world_size=1, num_layers=1, slices=(piece,)
    )
    with pytest.raises(CheckpointError, match="saved without a Trainer"):
        export_checkpoint(save([content]), tmp_path / "x.ckpt")
    assert list(tmp_path.iterdir()) == []
