"""What a stranger gets wrong in the first hour, and what is said of it: for a test and a benchmark.

Each mistake is a command in an empty folder with a few files. It must end by itself, with an exit
code that isn't 0, and its last line must say what is wrong.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_OWN = """
import lightning as L, torch
from torch import nn
from torch.utils.data import DataLoader
from lightning_hetero import HeteroDataModule, HeteroStrategy, LayerwiseCheckpoint, ParallelPlan

class Own(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 32)

    def training_step(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x[:, :-1]).mT, ids[:, 1:])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

ids = torch.arange(32).repeat(4, 2)
quiet = dict(
    accelerator="cpu", max_steps=2, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
)

def fit(strategy, model=None, data=None, devices=1, **options):
    data = DataLoader(ids, batch_size=2) if data is None else data
    trainer = L.Trainer(strategy=strategy, devices=devices, **quiet, **options)
    trainer.fit(model or Own(), data)
"""
_PACKED = """
from transformers import Qwen3Config, Qwen3ForCausalLM

class Packed(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = dict(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1)
        heads = dict(num_attention_heads=1, num_key_value_heads=1, head_dim=8)
        self.model = Qwen3ForCausalLM(Qwen3Config(**config, **heads))

    def training_step(self, batch):
        return self.model({inputs}).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

data = HeteroDataModule(list(ids), tokens_per_step=128, context_length=64)
fit(HeteroStrategy(), Packed(), data)
"""
_TWO_STAGES = {
    "pipelines": [{"stages": [{"ranks": [0], "layers": [0, 3]}, {"ranks": [1], "layers": [3, 4]}]}]
}
_CLUSTER = "nodes: [{device: A100, count: 2}]\n"


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One command and what it must say."""

    name: str
    words: tuple[str, ...]
    """What follows `python`; "-m lightning_hetero.cli" stands for the command of the wheel."""
    says: str
    """Pattern in the last line."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files of the folder, by name."""
    num_processes: int = 1
    """Ranks, started as a launcher does."""
    needs_s3: bool = False
    """Whether a server must run; its variables are in the environment."""

    @property
    def limit_s(self) -> float:
        """Seconds within which it must end."""
        return 10.0 if self.num_processes == 1 else 30.0

    def make_files(self, folder: Path) -> None:
        """Write what the command reads."""
        for name, text in self.files.items():
            (folder / name).write_text(text)

    def last_line(self, output: str) -> str:
        """Return the last line of what it wrote, and check that it says what is wrong."""
        last = output.rstrip().rpartition("\n")[2]
        assert re.search(self.says, last), f"{self.name}: {self.says!r} isn't in:\n{output[-3000:]}"
        return last


def _script(name: str, code: str, says: str, *, num_processes: int = 1) -> Mistake:
    return Mistake(
        name=name,
        words=("train.py",),
        files={"train.py": _OWN + code},
        says=says,
        num_processes=num_processes,
    )


def _command(name: str, words: str, says: str, **files: str) -> Mistake:
    named = {key.replace("_", "."): text for key, text in files.items()}
    return Mistake(
        name=name,
        words=("-m", "lightning_hetero.cli", *words.split()),
        files={"cluster.yaml": _CLUSTER, **named},
        says=says,
    )


_PLAN = "plan --cluster cluster.yaml --model llama-7b --sequence-length 512 --global-batch-size 8"


MISTAKES = (
    _script(
        "a vocabulary too small, on ranks that meet",
        f"fit(HeteroStrategy({_TWO_STAGES}), data=DataLoader(ids + 9, batch_size=2), devices=2)",
        "a token id that an embedding has no row for",
        num_processes=2,
    ),
    _script(
        "a packed batch without its borders",
        _PACKED.replace("{inputs}", "input_ids=batch['input_ids'], labels=batch['labels']"),
        r"BatchError: .* of \d packed samples without their borders.* model\(\*\*batch\)",
    ),
    _script(
        "a mask of a packed batch",
        _PACKED.replace("{inputs}", "**batch, attention_mask=batch['attention_mask']"),
        "BatchError: .* no 'attention_mask' .* has no padding, so it needs no mask",
    ),
    _script(
        "a plan that isn't there",
        "fit(HeteroStrategy('plan.json'))",
        "PlanError: Can't read the plan plan.json",
    ),
    _script(
        "a store that doesn't answer",
        "options = dict(key='key', secret='secret', endpoint_url='http://127.0.0.1:9')\n"
        "saving = LayerwiseCheckpoint('s3://bucket/run', storage_options=options)\n"
        "fit(HeteroStrategy(), callbacks=[saving])",
        "Rank 0: Can't write to s3://bucket/run: (EndpointConnectionError|TimeoutError)",
    ),
    _command(
        "listing a folder that isn't there",
        "checkpoint list nowhere",
        "error: Can't read nowhere: there is no such folder",
    ),
    Mistake(
        name="listing a bucket that isn't there",
        words=("-m", "lightning_hetero.cli", "checkpoint", "list", "s3://absent/run"),
        says="error: Can't read s3://absent/run: FileNotFoundError.*bucket does not exist",
        needs_s3=True,
    ),
    _command("a cluster of nothing", _PLAN, "error: cluster.yaml: ", cluster_yaml="nodes: null"),
    _command(
        "a wrong file for a plan",
        _PLAN.replace("plan ", "simulate plan.json ", 1),
        "error: plan.json: `trainer` is an unknown key",
        plan_json=f'{{"trainer": "{"x" * 5000}"}}',
    ),
    _command(
        "a log that is none",
        "stragglers cluster.yaml",
        "error: .*cluster.yaml must be an event log",
    ),
    _command("a command that isn't one", "paln", "error: .*invalid choice: 'paln'"),
)
"""What strangers have tried."""
