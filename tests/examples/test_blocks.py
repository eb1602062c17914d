"""Every Python block of the pages runs as it stands, beside the names that its page leaves open."""

import os
import re
import sys
from pathlib import Path

import fsspec
import pytest
import torch

from tests.scripts import run_python

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples").glob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{index}")
    for page in PAGES
    for index, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    )
]
STAND_INS = '''
import functools, lightning as L, torch
from torch.utils.data import DataLoader

L.Trainer = functools.partial(
    L.Trainer, accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False
)
torch.manual_seed(0)
train_dataset = [torch.randint(3, 32, (length,)) for length in range(4, 20)]


class Blocks(L.LightningModule):
    """What `model` is where a page says no more of it."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(4)])

    def training_step(self, batch):
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


model, datamodule = Blocks(), DataLoader(torch.randn(24, 4), batch_size=4)
'''


def save_tiny_model(folder: Path) -> None:
    """Save what `from_pretrained` finds in place of what it would download."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_as_it_stands(block, tmp_path, s3):
    if '"cuda"' in block and not torch.cuda.is_available():
        pytest.skip("what other strategies need CUDA for")
    if "from_pretrained" in block:
        save_tiny_model(tmp_path / "Qwen/Qwen3-0.6B")
    options = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{s3.port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
    }
    script = tmp_path / "block.py"
    # The one folder that is no test's to write.
    script.write_text(STAND_INS + block.replace('"/nvme/', f'"{tmp_path}/nvme/'))
    code, output = run_python([script], folder=tmp_path, **options)
    assert code == 0, output
    if "LayerwiseCheckpoint(" in block and ".fit(" in block:
        saved = fsspec.filesystem("s3", **s3.options(s3.port)).find("bucket/run")
        assert any("/step-" in name for name in saved), saved
