"""`LightningCLI` runs the strategy, and optimizers that it makes before the module is cut."""

from pathlib import Path

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import PlanError
from tests.scripts import run_python

CLI = """
from lightning import LightningModule
from lightning.pytorch.cli import LightningCLI
from tests.toy import ToyModule, ToyOptions, loader


class Module(ToyModule):
    configure_optimizers = LightningModule.configure_optimizers

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__(ToyOptions(num_layers=num_layers))

    def train_dataloader(self):
        return loader(8, 2)

    def on_train_end(self) -> None:
        plan = self.trainer.strategy.plan
        print(f"rank {self.global_rank} of {plan.num_pipelines} pipelines")
        print(f"after {self.trainer.global_step} steps")
        if self.optimizers().state:
            print("the optimizer has a state", flush=True)


LightningCLI(Module, seed_everything_default=1, save_config_callback=None)
"""

CONFIG = """
trainer:
  accelerator: cpu
  devices: 2
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy:
    class_path: lightning_hetero.HeteroStrategy
    init_args:
      num_stages: 2
      num_microbatches: 2
      ownership: even
optimizer:
  class_path: torch.optim.AdamW
  init_args:
    lr: 0.1
model:
  num_layers: 4
"""


@pytest.mark.dist
def test_a_command_line_names_the_strategy_in_yaml(tmp_path: Path) -> None:
    script, config = tmp_path / "script.py", tmp_path / "config.yaml"
    script.write_text(CLI)
    config.write_text(CONFIG)
    root = str(Path(__file__).resolve().parents[2])
    command = [script, "fit", "--config", config]
    code, output = run_python(command, folder=tmp_path, PYTHONPATH=root)
    assert code == 0, output
    assert "rank 0 of 1 pipelines" in output
    assert "rank 1 of 1 pipelines" in output
    assert output.count("after 4 steps") == 2
    assert output.count("the optimizer has a state") == 2


def parse(layers: str) -> range:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(HeteroStrategy, "strategy")
    plan = f"{{pipelines: [{{stages: [{{ranks: [0], layers: {layers}}}]}}]}}"
    parsed = parser.parse_string(f"strategy: {{plan: {plan}}}")
    return parser.instantiate(parsed).strategy._request.plan.pipelines[0].stages[0].layers


def test_layers_of_a_plan_in_yaml_are_a_list_or_a_range() -> None:
    for layers in ("[0, 4]", '"range(0, 4)"', '"range(4)"', '"[0, 4]"'):
        assert parse(layers) == range(4)
    for layers in ("[0, 4, 5, 6]", "[0, x]", "null", "all"):
        with pytest.raises((ArgumentError, PlanError)):
            parse(layers)
