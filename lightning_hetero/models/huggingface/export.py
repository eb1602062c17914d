"""Write a trained model as a folder that `from_pretrained` reads, from a checkpoint file.

The checkpoint is memory-mapped, so at most the weights of one written file are in memory. A module
that is whole after `fit` (`whole_after_run`) can also use its model's own `save_pretrained`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from lightning_hetero.core.errors import CheckpointError

__all__ = ["export_pretrained"]


def export_pretrained(
    checkpoint: str | Path,
    model: PreTrainedModel,
    folder: str | Path,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Write the model inside a Lightning checkpoint as `save_pretrained` does.

    `lightning-hetero checkpoint export` makes Lightning checkpoints of layer-wise ones.

    Args:
        checkpoint: The checkpoint file.
        model: A model like the one that was trained; it may be on the meta device, as in
            `with torch.device("meta"): AutoModelForCausalLM.from_config(config)`.
        folder: The folder to write.
        max_shard_size: Size of a file, in bytes or with a unit ("2GB").

    Raises:
        CheckpointError: The file can't be read, or holds no such model, or several.
    """
    try:
        state = torch.load(checkpoint, map_location="cpu", mmap=True, weights_only=True)
        state = state["state_dict"]
    except (OSError, RuntimeError, LookupError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"Can't read {checkpoint} as a Lightning checkpoint: {error}. Make one of a layer-wise "
            "checkpoint with `lightning-hetero checkpoint export`."
        ) from error
    names = list(model.state_dict())
    prefix = _find_prefix(state, names, type(model).__name__, checkpoint)
    own = {name: state[prefix + name] for name in names}
    model.save_pretrained(folder, state_dict=own, max_shard_size=max_shard_size)


def _find_prefix(
    state: Mapping[str, Any], names: list[str], kind: str, checkpoint: str | Path
) -> str:
    """Return the prefix of a model's names in a LightningModule's state, such as "model."."""
    prefixes = [key.removesuffix(names[0]) for key in state if key.endswith(names[0])]
    found = [prefix for prefix in prefixes if all(prefix + name in state for name in names)]
    if len(found) != 1:
        raise CheckpointError(
            f"{checkpoint} holds {len(found)} modules with the {len(names)} parameters of {kind} "
            f"(its keys begin with {sorted({key.partition('.')[0] for key in state})}). Give a "
            "model with the config that was trained."
        )
    return found[0]
