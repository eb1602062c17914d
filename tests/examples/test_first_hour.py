"""The first hour of somebody who has installed the wheel: what the pages show, and what goes wrong.

Every Python block of the pages runs as it stands, beside the names that its page leaves open.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from tests.callbacks.servers import S3Server
from tests.first_hour import MISTAKES, Mistake
from tests.wheel import Stranger, unpack_wheel

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NO_KEYS = {"AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null"}
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
MORE_STAND_INS = {
    "quantized": """
folder = "Qwen/Qwen3-0.6B"
""",
    "tensor-parallel": '''
from transformers import Qwen3Config, Qwen3ForCausalLM

sizes = dict(vocab_size=32, hidden_size=8, intermediate_size=16, num_hidden_layers=32)
heads = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=4)
base = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


class Tuned(L.LightningModule):
    """The `module` of the page, which has its `model`."""

    def configure_model(self):
        self.model = model

    def training_step(self, ids):
        return self.model(input_ids=ids, labels=ids).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.randint(3, 32, (8, 6)), batch_size=2)


module = Tuned()
''',
}
"""What else stands for the names that a page leaves open, by page."""
BLOCKS = [
    pytest.param(
        MORE_STAND_INS.get(page.stem, "") + block,
        id=f"{page.stem}-{index}",
        marks=[] if page.stem == "README" else pytest.mark.slow,
    )
    for page in PAGES
    for index, block in enumerate(
        re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)
    )
]


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


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stranger]:
    process = Stranger(unpack_wheel(tmp_path_factory.mktemp("wheel")))
    yield process
    process.close()


def aws(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_runs_as_it_stands(
    block: str, stranger: Stranger, tmp_path: Path, s3: S3Server
) -> None:
    if '"cuda"' in block and not torch.cuda.is_available():
        pytest.skip("what other strategies need CUDA for")
    if "_pretrained(" in block or "folder" in block:
        save_tiny_model(tmp_path / "Qwen/Qwen3-0.6B")
    script = tmp_path / "block.py"
    # The one folder that is no test's to write.
    script.write_text(STAND_INS + block.replace('"/nvme/', f'"{tmp_path}/nvme/'))
    caches = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    code, output = stranger.run([script], folder=tmp_path, **caches, **aws(s3))
    assert code == 0, output
    if "LayerwiseCheckpoint(" in block and ".fit(" in block:
        saved = fsspec.filesystem("s3", **s3.options(s3.port)).find("bucket/run")
        assert any("/step-" in name for name in saved), saved


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_a_mistake_ends_with_a_line_that_says_it(
    mistake: Mistake, stranger: Stranger, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    mistake.make_files(tmp_path)
    keys = aws(request.getfixturevalue("s3")) if mistake.needs_s3 else NO_KEYS
    variables = {**keys, "XDG_CACHE_HOME": str(tmp_path), "HF_HOME": str(tmp_path)}
    code, output = stranger.run(
        mistake.words, folder=tmp_path, num_processes=mistake.num_processes, **variables
    )
    assert code != 0, output
    mistake.last_line(output)
