"""A script that a test launches in different ways; every rank writes its losses to a file."""

import argparse
import json
import os
import pathlib

import lightning as L
import torch

from lightning_hetero import HeteroStrategy
from tests.plans import UNEQUAL
from tests.toy import ToyModule, ToyOptions, loader, quiet


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--start-method", default="popen")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    strategy = HeteroStrategy(
        UNEQUAL, num_microbatches=2, start_method=arguments.start_method, whole_after_run=True
    )
    trainer = L.Trainer(strategy=strategy, **quiet(devices=arguments.devices, max_steps=3))
    module = ToyModule(ToyOptions())
    trainer.fit(module, loader(64, 4))
    rank = os.environ.get("RANK", trainer.global_rank)
    losses = [float(value) for value in module.losses]
    report = {"losses": losses, "sum": float(sum(p.sum() for p in module.parameters()))}
    (arguments.output / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
