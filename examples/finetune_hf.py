"""Fine-tune a Hugging Face model on real text; strategy, plan and precision are in the YAML file.

Three processes on this machine, a pipeline of one rank beside one of two stages; then again, from
what the first run wrote; and under plain Lightning, one batch as large as those of both pipelines
(with `--data.shuffle false` in both runs, their losses are the same)::

    python examples/finetune_hf.py fit --config examples/finetune_hf.yaml
    python examples/finetune_hf.py fit --config examples/finetune_hf.yaml \
        --model.folder outputs/finetune_hf/model
    python examples/finetune_hf.py fit --config examples/finetune_hf.yaml \
        --trainer.strategy auto --trainer.devices 1 --data.samples_per_batch 12

The text is the source of Python's standard library. Nothing in `FineTuned` knows about plans.
"""

import math
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities import rank_zero_only
from text_data import PythonSourceData, PythonSourceDataset, source_files
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from lightning_hetero import HeteroStrategy
from lightning_hetero.models import PackedBatch
from lightning_hetero.models.huggingface import (
    load_pretrained,
    packed_inputs,
    use_packed_attention,
)

END_OF_TEXT = "<|end|>"
PROMPT = "def read_"


class FineTuned(L.LightningModule):
    """A causal language model of any family, on packed batches."""

    def __init__(
        self,
        *,
        config: dict[str, Any],
        vocab_size: int,
        output: Path,
        folder: Path | None = None,
        learning_rate: float = 3e-3,
    ) -> None:
        """Store what the model is built from.

        Args:
            config: `model_type` and the values of its config; not used with a folder.
            vocab_size: Tokens of the data's tokenizer.
            output: Where the trained model is written, as `save_pretrained` does.
            folder: A `save_pretrained` folder to start from.
            learning_rate: Of AdamW.
        """
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.output = output
        self.folder = folder
        self.learning_rate = learning_rate
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Build the model, or let the strategy read its slices from the folder."""
        if self.model is not None:
            return
        if self.folder is None:
            values = {**self.config, "vocab_size": self.vocab_size}
            self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**values))
        elif isinstance(self.trainer.strategy, HeteroStrategy):
            self.model = load_pretrained(self.folder)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(self.folder).train()
        use_packed_attention(self.model)

    def training_step(self, batch: PackedBatch) -> Tensor:
        """Return the mean loss over the batch's target tokens."""
        loss: Tensor = self.model(**packed_inputs(batch, labels=True)).loss
        self.log("train_loss", loss, prog_bar=True, batch_size=batch.num_target_tokens)
        return loss

    def validation_step(self, batch: PackedBatch) -> None:
        """Log the mean loss over the validation text."""
        loss = self.model(**packed_inputs(batch, labels=True)).loss
        self.log("val_loss", loss, prog_bar=True, batch_size=batch.num_target_tokens)

    def on_train_batch_end(self, outputs: Any, batch: PackedBatch, batch_idx: int) -> None:
        """Keep the step's loss."""
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW over all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class TokenizedSources(PythonSourceData):
    """Packed batches of Python sources in the tokens of a Hugging Face tokenizer."""

    def __init__(
        self,
        *,
        tokenizer: Path,
        vocab_size: int = 1024,
        context_length: int = 256,
        samples_per_batch: int = 6,
        max_files: int = 60,
        shuffle: bool = True,
    ) -> None:
        """Store the options.

        Args:
            tokenizer: Folder of the tokenizer; one is trained and saved there if it holds none.
            vocab_size: Tokens of the one that is trained.
            context_length: Tokens to keep of a longer sample.
            samples_per_batch: Samples of one pipeline in a step.
            max_files: Files to read.
            shuffle: Whether samples are drawn in random order.
        """
        super().__init__(
            context_length=context_length,
            samples_per_batch=samples_per_batch,
            max_files=max_files,
            shuffle=shuffle,
        )
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size

    def prepare_data(self) -> None:
        """Train the tokenizer where it is missing; called in one process."""
        if not (self.tokenizer / "tokenizer.json").is_file():
            train_tokenizer(self.vocab_size, self.max_files).save_pretrained(self.tokenizer)

    def setup(self, stage: str) -> None:
        """Read and tokenize the files of both splits."""
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)

        def encode(piece: bytes) -> Tensor:
            text = piece.decode("utf-8", errors="replace")
            return torch.tensor([*tokenizer.encode(text), tokenizer.eos_token_id])

        self.train, self.val = (
            PythonSourceDataset(
                split, context_length=self.context_length, max_files=self.max_files, encode=encode
            )
            for split in ("train", "val")
        )


class FineTuneCLI(LightningCLI):
    """Takes the vocabulary from the data, and writes the model after `fit`."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        """Link the options of model and data."""
        parser.link_arguments("data.vocab_size", "model.vocab_size")

    def after_fit(self) -> None:
        """Write the trained model and let it write."""
        # Whole weights, on rank 0 alone: every rank takes part in bringing them together.
        state = self.trainer.strategy.lightning_module_state_dict()
        report(self.trainer, self.model, self.datamodule, state)


@rank_zero_only
def report(
    trainer: L.Trainer, module: FineTuned, data: TokenizedSources, state: dict[str, Any]
) -> None:
    """Write the model with its tokenizer, read both back, and print what the run did."""
    weights = {name.removeprefix("model."): value for name, value in state.items()}
    module.model.save_pretrained(module.output, state_dict=weights)
    AutoTokenizer.from_pretrained(data.tokenizer).save_pretrained(module.output)
    model = AutoModelForCausalLM.from_pretrained(module.output)
    tokenizer = AutoTokenizer.from_pretrained(module.output)
    prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
    torch.manual_seed(0)
    tokens = model.generate(
        prompt, max_new_tokens=60, do_sample=True, top_k=20, pad_token_id=tokenizer.eos_token_id
    )
    print(
        f"\nstrategy    {type(trainer.strategy).__name__}, world size {trainer.world_size}, "
        f"{trainer.precision}"
        f"\ntrained     {trainer.global_step} steps of a {model.config.model_type} with "
        f"{model.num_parameters():,} parameters, from {module.folder or 'its config'}"
        f"\ntrain loss  {module.losses[0]:.3f} -> {module.losses[-1]:.3f}"
        f"\nval loss    {float(trainer.callback_metrics.get('val_loss', math.nan)):.3f}"
        f"\nmodel       {module.output}, read back by from_pretrained"
        f"\n\nIt writes, after {PROMPT!r}:\n\n{tokenizer.decode(tokens[0])}"
    )


def train_tokenizer(vocab_size: int, max_files: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on the library's sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in source_files(max_files)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def main() -> None:
    """Run the command line."""
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")  # Lightning 2.6 on torch 2.13
    disable_progress_bar()  # of transformers; Lightning's stays
    FineTuneCLI(FineTuned, TokenizedSources, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
