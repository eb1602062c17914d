"""Train architectures of Hugging Face's in two stages and on one device, from tiny configurations.

    python -m tests.models.huggingface.architectures [--head causal] [NAME ...]

Each one trains three steps on the same batches and from the same seed: by plain Lightning in one
process, and on two processes as two stages with two micro-batches. A line for each says whether
losses and weights came out alike ("equal"), or what was said at the first step instead ("refused").
Where they differ by more than sums in another order usually do, one device trains once more from
weights nudged by a rounding: what that changes tells how far rounding alone can lead.
Architectures of which no tiny model can be made, or which one device can't train on these batches,
are "not tried". It ends with 1 if one differed.
"""

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.fits import Case, Outcome, fit
from tests.processes import ProcessFailed, ProcessPool
from tests.toy import Compared

VOCABULARY, CONTEXT, PIXELS, CLASSES = 40, 12, 16, 3
ROWS, BATCH = 12, 4
MOST_PARAMETERS = 8_000_000
NEGLIGIBLE = 2e-5
"""Of losses, and of weights as a share of each tensor's largest: sums in another order."""
NUDGE, LIKE_A_NUDGE = 1e-7, 10.0
"""Share by which weights are nudged, and how much more than that may differ."""


@dataclass(frozen=True)
class Head:
    """What a model is asked for."""

    models: Any
    names: dict[str, Any]


def _head(models: str, names: str) -> Head:
    return Head(getattr(transformers, models), getattr(modeling_auto, names))


HEADS = {
    "causal": _head("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": _head("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "sequence": _head(
        "AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    ),
    "token": _head(
        "AutoModelForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"
    ),
    "seq2seq": _head("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image": _head(
        "AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    ),
}

_SIZES: tuple[tuple[int, str], ...] = (
    (32, "hidden_size d_model n_embd dim embed_dim emb_dim word_embed_proj_dim embedding_size"),
    (32, "max_source_positions max_target_positions"),
    (64, "max_position_embeddings n_positions n_ctx max_seq_len"),
    (48, "intermediate_size ffn_dim n_inner d_ff hidden_dim encoder_ffn_dim decoder_ffn_dim"),
    (16, "moe_intermediate_size q_lora_rank kv_lora_rank shared_expert_intermediate_size"),
    (8, "head_dim d_kv qk_nope_head_dim v_head_dim state_size mamba_d_state"),
    (8, "query_pre_attn_scalar hidden_size_per_layer_input"),
    (4, "num_hidden_layers n_layer num_layers n_layers laurel_rank block_size patch_size"),
    (4, "num_attention_heads n_head num_heads n_heads encoder_attention_heads"),
    (4, "decoder_attention_heads num_local_experts num_experts n_routed_experts"),
    (4, "sliding_window attention_window qk_rope_head_dim"),
    (2, "encoder_layers decoder_layers num_decoder_layers num_key_value_heads num_kv_heads"),
    (2, "num_experts_per_tok type_vocab_size"),
    (1, "n_shared_experts first_k_dense_replace n_group topk_group num_random_blocks"),
    (0, "num_kv_shared_layers"),
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (PIXELS, "image_size"),
)
"""What configurations call their sizes. Those that aren't named here stay as they are."""
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_BY_CHANCE = ("drop", "jitter", "noise")
"""Parts of the names of what is drawn by chance, which micro-batches do by themselves."""
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}


def tiny_config(name: str, head: str) -> Any:
    """Return an architecture's configuration with small sizes and without chance."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    values = default.to_dict()
    known = {key for key in values if key not in (getattr(default, "attribute_map", None) or {})}
    given: dict[str, Any] = {
        size: value
        for value, sizes in _SIZES
        for size in sizes.split()
        if size in known and isinstance(values[size], int | float)
    }
    given |= {key: value for key, value in _SPECIAL.items() if hasattr(default, key)}
    given |= {
        key: 0.0
        for key, value in values.items()
        if isinstance(value, float) and any(part in key for part in _BY_CHANCE)
    }
    if "qk_rope_head_dim" in known:  # All heads have their own latent keys.
        given.pop("head_dim", None)
        given["num_key_value_heads"] = given["num_attention_heads"]
    if values.get("layer_types"):
        kinds = list(dict.fromkeys(values["layer_types"]))
        count = given.get("num_hidden_layers", 4)
        given["layer_types"] = [kinds[index % len(kinds)] for index in range(count)]
    if head in ("sequence", "token", "image"):
        given["num_labels"] = CLASSES
    if head == "token":
        given["classifier_dropout"] = 0.0
    if head == "seq2seq":
        given["decoder_start_token_id"] = 0
    return kind(**{**given, **_OWN.get(name, {})}, use_cache=False)


class Samples(Dataset[dict[str, Tensor]]):
    """Random tokens or pictures, with what a head learns of them."""

    def __init__(self, head: str) -> None:
        generator = torch.Generator().manual_seed(3)
        ids = torch.randint(3, VOCABULARY, (ROWS, CONTEXT), generator=generator)
        pictures = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
        classes = torch.randint(CLASSES, (ROWS, CONTEXT), generator=generator)
        labels = {"sequence": classes[:, 0], "image": classes[:, 0], "token": classes}
        self._columns = {"labels": labels.get(head, ids)}
        self._columns |= {"pixel_values": pictures} if head == "image" else {"input_ids": ids}

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


class Architecture(Compared):
    """What a user writes around a model, whose weights may be nudged by a share."""

    def __init__(self, name: str, head: str, nudge: float) -> None:
        super().__init__()
        transformers.logging.set_verbosity_error()
        config, models = tiny_config(name, head), HEADS[head].models
        with torch.device("meta"):
            size = sum(item.numel() for item in models.from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"{size} parameters are too many")
        self._head = head
        self.model = models.from_config(config).train()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1 + nudge * (2 * torch.rand_like(parameter) - 1))

    def rows(self, num_empty: int) -> Dataset[dict[str, Tensor]]:
        return Samples(self._head)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def case_of(name: str, head: str, *, nudge: float = 0.0) -> Case:
    """Return a case of two stages."""
    given: dict[str, Any] = {"world_size": 2, "options": {"num_stages": 2}, "seed": 5}
    model = partial(Architecture, name, head, nudge)
    return Case(model=model, batch_size=BATCH, num_microbatches=2, **given)


def difference(alone: Outcome, staged: Outcome) -> float:
    """Return the largest difference as a share of what it is one of; infinite if parts lack."""
    if len(alone.losses) != len(staged.losses) or {*alone.weights} != {*staged.weights}:
        return math.inf
    shares = [abs(a - b) / abs(a) for a, b in zip(alone.losses, staged.losses, strict=True)]
    for key, weight in alone.weights.items():
        if weight.size:
            largest = max(float(np.abs(weight).max()), 1e-3)
            shares.append(float(np.abs(weight - staged.weights[key]).max()) / largest)
    return max(shares)


def judge(pool: ProcessPool, name: str, head: str) -> tuple[str, str]:
    """Return "equal", "differs", "refused" or "not tried", and why."""
    case = case_of(name, head)
    try:
        (alone,) = pool.run(fit, 1, case.on_single_device())
    except ProcessFailed as error:
        return "not tried", _last_line(error)
    if not all(map(math.isfinite, alone.losses)):
        return "not tried", "its losses aren't finite on one device"
    try:
        staged, _ = pool.run(fit, 2, case)
    except ProcessFailed as error:
        return "refused", _last_line(error)
    found = difference(alone, staged)
    if found <= NEGLIGIBLE:
        return "equal", f"{found:.1e}"
    (nudged,) = pool.run(fit, 1, case_of(name, head, nudge=NUDGE).on_single_device())
    by_rounding = difference(alone, nudged)
    verdict = "equal" if found <= LIKE_A_NUDGE * by_rounding else "differs"
    return verdict, f"{found:.1e}, nudged {by_rounding:.1e}"


def _last_line(error: ProcessFailed) -> str:
    lines = next(iter(error.failures.values())).strip().splitlines()
    return next((line for line in reversed(lines) if line[:1].strip()), lines[-1])[:200]


def judge_all(names: Sequence[str], head: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, verdict and why of each architecture."""
    pool = ProcessPool()
    for name in names:
        yield name, *judge(pool, name, head)
    pool.close()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", choices=[*HEADS], help="by default all, one after the other")
    parser.add_argument("names", nargs="*", metavar="NAME", help="by default all of the head")
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for head in [arguments.head] if arguments.head else HEADS:
        names = [
            name for name in HEADS[head].names if name in arguments.names or not arguments.names
        ]
        for name, verdict, why in judge_all(names, head):
            say(f"{head:9} {name:28} {verdict:9} {why}")
            counts[verdict] += 1
    say(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    sys.exit(1 if counts["differs"] else 0)


if __name__ == "__main__":
    main()
