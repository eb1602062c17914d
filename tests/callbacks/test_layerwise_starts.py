"""How a run with a `LayerwiseCheckpoint` starts: anew, where it was, or not at all."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_hetero import HeteroStrategy
from lightning_hetero.callbacks import ElasticRestart, LayerwiseCheckpoint
from lightning_hetero.core.errors import CheckpointError, ConfigurationError
from tests.callbacks.layerwise_runs import export, train
from tests.callbacks.servers import S3Server
from tests.toy import TokenRows, ToyModule, ToyOptions, loader, quiet

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("limit", ["steps", "epochs"])
def test_a_finished_run_that_is_started_again_does_nothing(tmp_path: Path, limit: str) -> None:
    assert len(train(tmp_path, 4, in_epochs=limit == "epochs")) == 4
    before = set(tmp_path.rglob("*"))
    with pytest.warns(UserWarning, match=r"complete at step 4.*delete its folders"):
        assert train(tmp_path, 4, in_epochs=limit == "epochs") == []
    # Nor does it keep others from the folder, as long as its process goes on.
    assert set(tmp_path.rglob("*")) == before
    assert len(train(tmp_path, 4, in_epochs=limit == "epochs", resume=False)) == 4
    # Whoever is started later goes on from the newest run.
    assert len(train(tmp_path, 6)) == 2


class Reads(Callback):
    """Writes down the samples of each step."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        self.rows.append(batch[0].tolist())


@pytest.mark.parametrize("stop", [2, 4])
def test_a_run_that_nobody_seeds_goes_on_in_the_order_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)

    def read(folder: Path, seed: int, max_steps: int) -> list[Any]:
        torch.manual_seed(seed)  # Each process draws one by chance.
        reads = Reads()
        saving = LayerwiseCheckpoint(folder, every_n_train_steps=100, shared_memory=False)
        options = {"max_steps": max_steps, "callbacks": [saving, reads], "devices": 1}
        trainer = L.Trainer(
            strategy=HeteroStrategy(num_stages=1),
            **quiet(**options) | {"enable_checkpointing": True},
        )
        trainer.fit(
            ToyModule(ToyOptions(num_layers=1)),
            StatefulDataLoader(TokenRows(16), batch_size=4, shuffle=True),
        )
        return reads.rows

    # Four steps are an epoch.
    expected = read(tmp_path / "one", 1, 7)
    parts = read(tmp_path / "two", 1, stop) + read(tmp_path / "two", 2, 7)
    assert parts == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "bucket", "endpoint", "why"),
    [
        (None, "bucket", None, "NoCredentials"),
        ("test", "absent", None, "bucket does not exist"),
        ("test", "bucket", "http://127.0.0.1:9", "Could not connect|There was no progress"),
    ],
)
def test_a_store_that_takes_no_checkpoints_is_refused_before_training(
    key: str | None,
    bucket: str,
    endpoint: str | None,
    why: str,
    s3: S3Server,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    options = S3Server.options(s3.port) | {"key": key, "secret": key}
    options["endpoint_url"] = endpoint or options["endpoint_url"]
    # As a user has it, who names no number of tries.
    del options["config_kwargs"]
    with pytest.raises(CheckpointError, match=f"Can't write to s3://{bucket}/run: .*({why})"):
        train(f"s3://{bucket}/run", 2, storage_options=options)


def test_a_file_to_resume_from_is_taken_only_while_there_is_no_checkpoint(tmp_path: Path) -> None:
    train(tmp_path / "run", 4)
    export(tmp_path / "run", tmp_path / "whole.ckpt")
    options = {"ckpt_path": tmp_path / "whole.ckpt"}
    gone_on = train(tmp_path / "other", 6, **options)
    assert len(gone_on) == 2
    assert len(train(tmp_path / "other", 8, **options)) == 2


def test_the_only_lasting_place_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="Not a directory"):
        train(tmp_path / "file", 8)


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="every_n_train_steps is 0"):
        LayerwiseCheckpoint(tmp_path, every_n_train_steps=0)
    with pytest.raises(ConfigurationError, match="outlives"):
        LayerwiseCheckpoint()
    with pytest.raises(ConfigurationError, match="drain_timeout_s is 0"):
        ElasticRestart(drain_timeout_s=0)
    with pytest.raises(ConfigurationError, match="heartbeat_timeout is"):
        ElasticRestart(in_place=True, heartbeat_timeout=timedelta(0))
    alone = quiet(max_steps=1, devices=1, strategy=HeteroStrategy(num_stages=1))
    trainer = L.Trainer(callbacks=[ElasticRestart()], **alone)
    with pytest.raises(ConfigurationError, match="needs one LayerwiseCheckpoint"):
        trainer.fit(ToyModule(ToyOptions()), loader(8, 4))
    checkpoint = LayerwiseCheckpoint(tmp_path)
    settings = {**quiet(max_steps=1, devices=1), "enable_checkpointing": True}
    trainer = L.Trainer(strategy="ddp", callbacks=[checkpoint], **settings)
    with pytest.raises(ConfigurationError, match=r"need HeteroStrategy.*this is DDPStrategy"):
        trainer.fit(ToyModule(ToyOptions()), loader(8, 4))
