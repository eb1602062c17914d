"""Runs that watch, from inside the layers, what autograd keeps of them and what runs again."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning as L
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from lightning_hetero.runtime.setup.products import SavedBytes
from lightning_hetero.runtime.stage.recomputation import LayerCall, Recomputation
from lightning_hetero.runtime.tensor_parallel import collectives
from tests.fits import SEED, Case, Outcome, outcome_of, train
from tests.runtime.case_modules import PackedModule
from tests.without_check import WITHOUT_CHECK


@contextmanager
def counting_layers() -> Iterator[list[int]]:
    """Collect the bytes that autograd saves inside of each layer.

    Without weights, and what all layers share, and without layers that the runtime counts itself.
    """
    totals: list[int] = []
    run = Recomputation.run

    def counted(self: Recomputation, call: LayerCall, layer: nn.Module, *others: Any) -> Any:
        if self.measured is not None:
            return run(self, call, layer, *others)
        _, *given = tree_leaves(list(call.given.values()))
        shared = [item for item in given if isinstance(item, Tensor)]
        with SavedBytes(without=(*layer.parameters(), *layer.buffers(), *shared)) as saved:
            output = run(self, call, layer, *others)
        totals.append(saved.total)
        return output

    with mock.patch.object(Recomputation, "run", counted):
        yield totals


class LiveActivations:
    """Counts the bytes that layers' activations take, from when they are saved until they go."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.peak = 0
        self.num_forwards = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        for layer in layers:
            layer.forward = self._watched(layer, layer.forward)

    def _watched(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.num_forwards += 1
            if not torch.is_grad_enabled():
                return forward(hidden, *args, **kwargs)
            shared = [item for item in args if isinstance(item, Tensor)]
            known = {t.untyped_storage().data_ptr() for t in (*layer.parameters(), *shared)}
            outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
            pack, unpack = outer or (lambda tensor: tensor, lambda tensor: tensor)
            drops = outer is not None and pack.__qualname__.startswith("_checkpoint_hook")

            def note(tensor: Tensor) -> Any:
                storage = tensor.untyped_storage()
                if not drops and storage.data_ptr() not in known:
                    self._note(storage)
                return pack(tensor)

            if drops:
                self._note(hidden.untyped_storage())
            with saved_tensors_hooks(note, unpack):
                return forward(hidden, *args, **kwargs)

        return run

    def _note(self, storage: torch.UntypedStorage) -> None:
        self._live = {key: item for key, item in self._live.items() if not item[0].expired()}
        self._live[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))


@dataclass
class Watched:
    """What a rank saw."""

    outcome: Outcome
    peaks: list[int] = field(default_factory=list)
    """Bytes of live activations, the most of each iteration."""
    num_forwards: list[int] = field(default_factory=list)
    """Layers computed in each iteration, again or for the first time."""


class WatchedModule(PackedModule):
    """The reference model on packed samples, watched."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.live = LiveActivations(list(self.model.layers))
        self.peaks: list[int] = []
        self.num_forwards: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.live.peak = self.live.num_forwards = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.peaks.append(self.live.peak)
        self.num_forwards.append(self.live.num_forwards)


def train_watched(rank: int, cases: list[Case]) -> list[Watched]:
    """Train each case and say what its layers kept."""
    found = []
    for case in cases:
        L.seed_everything(SEED, verbose=False)
        module = WatchedModule(case)
        with WITHOUT_CHECK:
            outcome = outcome_of(train(case, module=module))
        found.append(Watched(outcome, module.peaks, module.num_forwards))
    return found


@dataclass(frozen=True)
class Counted:
    """What a rank saved, and said to its tensor-parallel group."""

    outcome: Outcome
    saved_bytes: int
    """Of all its layers' passes together."""
    num_sums: int
    """Tensors that were summed over the group."""


def train_counted(rank: int, cases: list[Case]) -> list[Counted]:
    """Train the reference model in each case and say what its layers kept."""
    found = []
    for case in cases:
        L.seed_everything(SEED, verbose=False)
        add = mock.Mock(side_effect=collectives._all_reduce)
        watch = mock.patch.object(collectives, "_all_reduce", add)
        with WITHOUT_CHECK, counting_layers() as totals, watch:
            outcome = outcome_of(train(case, module=PackedModule(case)))
        found.append(Counted(outcome, sum(totals), add.call_count))
    return found


def refused_budget(rank: int, case: Case) -> tuple[str, int]:
    """Return what stops a case, and after how many steps."""
    L.seed_everything(SEED, verbose=False)
    module = WatchedModule(case)
    try:
        train(case, module=module)
    except Exception as error:
        return f"{type(error).__name__}: {error}", len(module.losses)
    return "trained", len(module.losses)
