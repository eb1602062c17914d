"""QLoRA on unequal devices: a 4-bit model in two unequal stages, adapters trained beside it.

Two processes on this machine, and the same under plain Lightning, with the same losses::

    python examples/qlora.py fit --config examples/qlora.yaml
    python examples/qlora.py fit --config examples/qlora.yaml \
        --trainer.strategy auto --trainer.devices 1

The base model is a small one from a config, so that this runs anywhere; name the folder of yours
with `--model.base`. Quantized weights have no owners and never travel: ranks exchange adapters, and
checkpoints hold adapters only.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from finetune_hf import FineTuned, TokenizedSources
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.utils.logging import disable_progress_bar

from lightning_hetero import HeteroStrategy
from lightning_hetero.models.huggingface import (
    add_adapters,
    load_pretrained,
    use_packed_attention,
)


class QLoRA(FineTuned):
    """A causal language model in 4 bits with LoRA adapters, on packed batches."""

    def __init__(
        self, *, config: dict[str, Any], vocab_size: int, output: Path, base: Path, rank: int = 8
    ) -> None:
        """Store what the model is built from.

        Args:
            config: `model_type` and the values of its config; used if there is no base yet.
            vocab_size: Tokens of the data's tokenizer.
            output: Where the adapter is written, as `save_pretrained` does.
            base: The `save_pretrained` folder of the base model.
            rank: Of the adapters.
        """
        super().__init__(config=config, vocab_size=vocab_size, output=output)
        self.base = base
        self.rank = rank
        self.strict_loading = False  # Checkpoints then hold no frozen weights.

    def prepare_data(self) -> None:
        """Write a base model where there is none; called in one process."""
        if not (self.base / "config.json").is_file():
            config = AutoConfig.for_model(**{**self.config, "vocab_size": self.vocab_size})
            with torch.random.fork_rng():  # Adapters are drawn alike with and without it.
                AutoModelForCausalLM.from_config(config).save_pretrained(self.base)

    def configure_model(self) -> None:
        """Build the base model in 4 bits, and add adapters.

        Under HeteroStrategy each rank reads and quantizes the layers of its stage, one weight at a
        time; plain Lightning has one process, which loads the whole model.
        """
        if self.model is not None:
            return
        four_bits = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
        adapters = LoraConfig(r=self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        if isinstance(self.trainer.strategy, HeteroStrategy):
            model = load_pretrained(self.base, quantization_config=four_bits)
            use_packed_attention(model)
            self.model = add_adapters(model, adapters)
        else:
            model = AutoModelForCausalLM.from_pretrained(self.base, quantization_config=four_bits)
            use_packed_attention(model)
            self.model = get_peft_model(model.train(), adapters)


class QLoRACLI(LightningCLI):
    """Takes the vocabulary from the data, and writes the adapter after `fit`."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Link the options of model and data."""
        parser.link_arguments("data.vocab_size", "model.vocab_size")

    def after_fit(self) -> None:
        """Write the adapter, of which every rank has a part, and read it back."""
        state = self.trainer.strategy.lightning_module_state_dict()
        report(self.model, state)


@rank_zero_only
def report(module: QLoRA, state: dict[str, Any]) -> None:
    """Write the adapter, read it back by PEFT, and print what the run did."""
    weights = {name.removeprefix("model."): value for name, value in state.items()}
    module.model.save_pretrained(module.output, state_dict=weights)
    base = AutoModelForCausalLM.from_pretrained(module.base)
    PeftModel.from_pretrained(base, module.output)
    num_bytes = (module.output / "adapter_model.safetensors").stat().st_size
    print(
        f"\nbase        {base.num_parameters():,} parameters in {module.base}, trained in 4 bits"
        f"\ntrain loss  {module.losses[0]:.3f} -> {module.losses[-1]:.3f}"
        f"\nadapter     {num_bytes:,} bytes in {module.output}, read back by PEFT"
    )


def main() -> None:
    """Run the command line."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 on torch 2.13
    disable_progress_bar()  # of transformers; Lightning's stays
    QLoRACLI(QLoRA, TokenizedSources, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
