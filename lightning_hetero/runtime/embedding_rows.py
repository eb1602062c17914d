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

__all__ = ["EmbeddingRows"]

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
        self.asked: tuple[nn.Embedding, Tensor] | None = None
        """The embedding that was called last, and its ids."""
        self._module = module
        self._ranges: dict[int, tuple[int, int]] = {}
        check = _Check(self)
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
        self._ranges, self.asked = {}, None
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
        # Of ids computed from the batch nothing is known, and looking would wait for the device.
        lowest, highest = self._ranges.get(ids.untyped_storage().data_ptr(), (0, 0))
        return lowest < 0 or highest >= num_rows

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Explain torch's errors about indices inside this context.

        Raises:
            BatchError: In place of an IndexError of one of the module's embeddings; it names it.
        """
        try:
            yield
        except IndexError as error:
            if self.asked is not None:
                self.check(*self.asked, error)
            raise
        except RuntimeError as error:
            if "device-side assert" in str(error):
                error.add_note(_DEVICE_ASSERT)
            raise

    def check(self, embedding: nn.Embedding, ids: Tensor, cause: Exception | None = None) -> None:
        """Raise BatchError if there are ids of rows that the embedding doesn't have."""
        lowest, highest = (int(value) for value in ids.aminmax())
        num_rows = embedding.num_embeddings
        if lowest >= 0 and highest < num_rows:
            return
        name = next((n for n, item in self._module.named_modules() if item is embedding), "?")
        raise BatchError(
            f"The embedding {name!r} has {num_rows} rows (0 to {num_rows - 1}), but the batch asks "
            f"for rows {lowest} to {highest}. If these are token ids, take the tokenizer that the "
            f"model was made for, or a vocabulary of at least {highest + 1}; if positions, shorter "
            "samples or more positions."
        ) from cause


class _Check:
    """A pre-forward hook of an embedding; copies of the embedding aren't checked."""

    def __init__(self, rows: EmbeddingRows) -> None:
        self._rows = rows

    def __call__(self, embedding: nn.Module, args: tuple[object, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        assert isinstance(embedding, nn.Embedding)
        ids = args[0] if args else None
        # Unknown and traced tensors have no values, and are of other types.
        if type(ids) is Tensor and ids.dtype in _ID_DTYPES and not ids.is_meta and ids.numel():
            self._rows.asked = embedding, ids
            if self._rows.may_lie_outside(ids, embedding.num_embeddings):
                self._rows.check(embedding, ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unchecked, ()


def _unchecked() -> Callable[..., None]:
    return _check_nothing


def _check_nothing(*_: object) -> None:
    pass
