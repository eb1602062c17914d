"""Name the embedding that was asked for a row it doesn't have: usually the vocabulary is too small.

On a CPU torch says only "index out of range in self". On CUDA the kernel asserts, and every later
call of the process fails with an error that names neither rows nor model. So the range of a batch's
integers is found on the host, before they go to the device: one pass over them (100,000 token ids:
0.03 ms). Nothing waits for the device unless an id is too large for an embedding.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import BatchError

__all__ = ["EmbeddingRows", "explain_unknown_rows"]

_ID_DTYPES = (torch.int32, torch.int64)
_DEVICE_ASSERT = (
    "A kernel was given an index outside of a tensor: as a rule a label that the logits have no "
    "class for, or a token id that the embedding has no row for. Run a step with accelerator='cpu' "
    "or CUDA_LAUNCH_BLOCKING=1 to see which."
)


class EmbeddingRows:
    """Checks the ids that a module's embeddings get, if they come from the batch unchanged.

    Embeddings whose class has its own forward, which may count rows differently, are left out.

    Args:
        module: The user's LightningModule.
    """

    def __init__(self, module: nn.Module) -> None:
        self._ranges: dict[int, tuple[int, int]] = {}
        check = _Check(self, module)
        self._handles = [
            item.register_forward_pre_hook(check)
            for item in module.modules()
            if isinstance(item, nn.Embedding) and type(item).forward is nn.Embedding.forward
        ]

    def note_batch(self, on_host: Iterable[Tensor], moved: Iterable[Tensor]) -> None:
        """Record the range of integers in the next iteration's batch.

        Args:
            on_host: Its tensors before they go to the device.
            moved: The same tensors on the device.
        """
        self._ranges = {}
        # Not strict: transfer hooks of the user's may have changed the batch.
        for before, tensor in zip(on_host, moved, strict=False):
            if before.is_cpu and before.numel() and before.dtype in _ID_DTYPES:
                address = tensor.untyped_storage().data_ptr()
                lowest, highest = (int(value) for value in before.aminmax())
                known = self._ranges.get(address, (lowest, highest))
                self._ranges[address] = min(known[0], lowest), max(known[1], highest)

    def remove(self) -> None:
        """Stop checking."""
        for handle in self._handles:
            handle.remove()

    def may_lie_outside(self, ids: Tensor, num_rows: int) -> bool:
        """Return whether ids may lie outside the rows; False if they aren't the batch's own."""
        if torch.compiler.is_compiling():
            return False
        # Of ids computed from the batch nothing is known, and looking would wait for the device.
        lowest, highest = self._ranges.get(ids.untyped_storage().data_ptr(), (0, 0))
        return lowest < 0 or highest >= num_rows


class _Check:
    """A pre-forward hook of an embedding; copies of the embedding aren't checked."""

    def __init__(self, rows: EmbeddingRows, module: nn.Module) -> None:
        self._rows = rows
        self._module = module

    def __call__(self, embedding: nn.Module, args: tuple[object, ...]) -> None:
        assert isinstance(embedding, nn.Embedding)
        ids = args[0] if args else None
        # Unknown and traced tensors have no values, and are of other types.
        if type(ids) is not Tensor:
            return
        with torch._C.DisableTorchFunction():  # Nothing that watches the step looks at this.
            is_row = ids.dtype in _ID_DTYPES and not ids.is_meta and ids.numel()
            if is_row and self._rows.may_lie_outside(ids, embedding.num_embeddings):
                _refuse_unknown_rows(self._module, embedding, ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchecked, ()


def _unchecked() -> Callable[..., None]:
    return _check_nothing


def _check_nothing(*_: object) -> None:
    pass


@contextmanager
def explain_unknown_rows(module: nn.Module) -> Iterator[None]:
    """Explain torch's errors about indices inside this context.

    Raises:
        BatchError: In place of an IndexError of one of the module's embeddings; it names it.
    """
    try:
        yield
    except IndexError as error:
        following = error.__traceback__
        while following is not None:
            known = following.tb_frame.f_locals
            following = following.tb_next
            embedding, rows = known.get("self"), known.get("input")
            if isinstance(embedding, nn.Embedding) and isinstance(rows, Tensor):
                _refuse_unknown_rows(module, embedding, rows, error)
        raise
    except RuntimeError as error:
        if "device-side assert" in str(error):
            error.add_note(_DEVICE_ASSERT)
        raise


def _refuse_unknown_rows(
    module: nn.Module, embedding: nn.Embedding, rows: Tensor, cause: Exception | None = None
) -> None:
    """Raise BatchError if there are rows that the embedding doesn't have."""
    lowest, highest = (int(value) for value in rows.aminmax())
    num_rows = embedding.num_embeddings
    if lowest >= 0 and highest < num_rows:
        return
    name = next((n for n, item in module.named_modules() if item is embedding), "?")
    raise BatchError(
        f"The embedding {name!r} has {num_rows} rows (0 to {num_rows - 1}), but the batch asks for "
        f"rows {lowest} to {highest}. If these are token ids, take the tokenizer that the model "
        f"was made for, or a vocabulary of at least {highest + 1}; if positions, shorter samples "
        "or more positions."
    ) from cause
