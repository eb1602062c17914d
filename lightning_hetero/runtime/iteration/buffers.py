"""Decide whose values count for buffers that steps change, and share them with all ranks.

A layer's buffers change on the layer's stage. Buffers outside the layers change on every stage if
code before the layers changes them, and on last stages if code after the layers does. The values of
the first pipeline that changes a buffer count; in it, those of the layer's stage or, for a buffer
outside the layers, of the first stage that changes it. All ranks get these values before an
evaluation, a checkpoint, a change of plan and the end.

One device changes a buffer once, with the whole batch. A buffer that several micro-batches change,
or that pipelines change differently, depends on a micro-batch's content, as BatchNorm's statistics
do: it is refused in the first iteration in which this happens, unless the user accepts it.

A buffer that isn't persistent may also be a cache that grows with the longest micro-batch: a new
shape doesn't count as a change. New values do, as with Hugging Face's rotary frequencies that
depend on a batch's length.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout

__all__ = ["BufferChange", "BufferWatch"]


@dataclass(frozen=True, slots=True)
class BufferChange:
    """One rank's report on a buffer that an iteration has changed."""

    name: str
    is_repeated: bool
    """Whether several of the rank's actions changed it."""
    is_versioned: bool
    """Whether changes increment its version; `buffer.data.copy_(...)` doesn't."""
    digest: int
    """Digest of the new values, in the first iteration and for caches; else 0."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a buffer is registered."""

    name: str
    owner: nn.Module
    attribute: str
    layer: int | None
    is_cache: bool
    """Whether it isn't persistent, so that no `state_dict` has it."""

    @property
    def current(self) -> Tensor | None:
        return self.owner._buffers.get(self.attribute)

    def put(self, value: Tensor) -> None:
        buffer = self.current
        assert buffer is not None
        if buffer.shape == value.shape and not buffer.is_inference():
            buffer.copy_(value)
        else:
            self.owner._buffers[self.attribute] = value.to(buffer.device)


class BufferWatch:
    """Finds out which buffers of a module steps change, and keeps them equal on all ranks.

    Every rank calls `begin` before an iteration, `look` after each action, `report` before the
    agreement and `settle` after it, and `share` where all ranks need the same values.

    Args:
        module: The module; buffers whose first values differ between ranks become rank 0's.
        layout: Its layers.
        comms: The communicators.
        may_differ: Whether buffers may depend on a micro-batch's content.
    """

    def __init__(
        self, module: nn.Module, layout: ModelLayout, comms: Communicators, *, may_differ: bool
    ) -> None:
        self._comms = comms
        self._may_differ = may_differ
        layers = {id(part): i for i, layer in enumerate(layout.layers) for part in layer.modules()}
        self._slots = {
            slot.name: slot
            for prefix, owner in module.named_modules()
            for attribute, buffer in owner._buffers.items()
            if buffer is not None
            for slot in [
                _Slot(
                    _join(prefix, attribute),
                    owner,
                    attribute,
                    layers.get(id(owner)),
                    attribute in owner._non_persistent_buffers_set,
                )
            ]
        }
        self._begun: set[int] = set()
        self._is_first = True
        self._seen: dict[str, tuple[Tensor | None, int]] = {}
        self._values: dict[str, Tensor] = {}
        self._unversioned: set[str] = set()
        """Buffers that changed in any rank's first iteration while their version didn't."""
        self._rewritten: set[str] = set()
        """Buffers whose version changed in a first iteration while their values didn't."""
        self._counts: Counter[str] = Counter()
        self._sources: dict[str, int] = {}
        """For each buffer that has changed since it was shared, the rank whose values count."""
        self._share_drawn()

    def _share_drawn(self) -> None:
        """Take from rank 0 the buffers whose first values differ between ranks; collective."""
        digests = {name: _digest(slot.current) for name, slot in self._slots.items()}
        gathered = self._comms.gather_objects(digests)
        differing = {
            name for other in gathered for name in digests if other.get(name) != gathered[0][name]
        }
        self._sources = dict.fromkeys(sorted(differing), 0)
        self.share()

    # -- an iteration ---------------------------------------------------------------------------

    def begin(self, phase: int) -> None:
        """Note the buffers' state before an iteration of a phase, such as training."""
        self._is_first = phase not in self._begun
        self._begun.add(phase)
        self._counts.clear()
        for name, slot in self._slots.items():
            self._seen[name] = _mark(slot.current)
            if (self._is_first or name in self._rewritten) and slot.current is not None:
                self._values[name] = slot.current.clone()

    def look(self) -> None:
        """Count the buffers that the last action has changed."""
        for name, slot in self._slots.items():
            self._counts[name] += self._has_changed(name, slot)

    def _has_changed(self, name: str, slot: _Slot) -> bool:
        before, self._seen[name] = self._seen[name], _mark(slot.current)
        old, buffer = before[0], self._seen[name][0]
        is_new = buffer is not old or self._seen[name][1] != before[1]
        if old is None or buffer is None:
            return is_new and not slot.is_cache
        if slot.is_cache and buffer.shape != old.shape:
            self._values.pop(name, None)
            return False
        value = self._values.get(name)
        if value is not None:
            is_equal = torch.equal(buffer, value)
            if is_equal and is_new:
                self._rewritten.add(name)
            if not is_equal and not is_new:
                self._unversioned.add(name)
            if not is_equal:
                self._values[name] = buffer.clone()
            return not is_equal
        if slot.is_cache and buffer is not old:
            return not torch.equal(buffer, old)
        return is_new

    def report(self, layers: Container[int]) -> tuple[BufferChange, ...]:
        """Return the changed buffers of these layers, and of modules outside the layers."""
        changes = []
        for name, slot in self._slots.items():
            count = self._counts[name] or name in self._unversioned
            if count and (slot.layer is None or slot.layer in layers):
                digest = _digest(slot.current) if self._is_first or slot.is_cache else 0
                is_versioned = name not in self._unversioned
                changes.append(BufferChange(name, count > 1, is_versioned, digest))
        self._values.clear()
        return tuple(changes)

    def settle(self, reports: Mapping[int, Sequence[BufferChange]], plan: ParallelPlan) -> None:
        """Decide whose buffers count; all ranks decide the same.

        Args:
            reports: By global rank, the buffers that it has changed, if any.
            plan: The plan that ran.

        Raises:
            StepError: A buffer depends on a micro-batch's content.
        """
        found: dict[str, dict[int, tuple[int, BufferChange]]] = defaultdict(dict)
        if not reports:
            return
        for pipeline_index, _, stage in plan.iter_stages():
            for rank in stage.ranks:
                for change in reports.get(rank, ()):
                    found[change.name].setdefault(pipeline_index, (rank, change))
        for name, changes in found.items():
            if not all(change.is_versioned for _, change in changes.values()):
                self._unversioned.add(name)
            self._sources[name] = changes[min(changes)][0]
            self._check(name, [change for _, change in changes.values()])

    def _check(self, name: str, changes: Sequence[BufferChange]) -> None:
        """Refuse a buffer that depends on a micro-batch's content; one change per pipeline."""
        is_repeated = any(change.is_repeated for change in changes)
        if self._may_differ or (not is_repeated and len({c.digest for c in changes}) == 1):
            return
        raise StepError(
            f"{name} changes with what each micro-batch holds, {len(changes)} pipelines "
            f"{'several times' if is_repeated else 'once'} in an iteration; one device changes "
            "it once, with the whole batch, and would train otherwise. Use one pipeline and "
            "num_microbatches=1 (without activation checkpointing), a layer such as LayerNorm or "
            "GroupNorm, or accept it as DDP does: HeteroStrategy(allow_mixing=True) keeps the "
            "first pipeline's values."
        )

    # -- the same everywhere --------------------------------------------------------------------

    @property
    def are_shared(self) -> bool:
        """Whether all ranks have the same values, and any change increments a version."""
        return not self._sources and not self._unversioned

    def share(self) -> None:
        """Give all ranks the values of changed buffers; called by every rank."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, source in sorted(self._sources.items()):
            names[source].append(name)
        self._sources.clear()
        if self._comms.world_size == 1:
            return
        # Buffers made in an evaluation's inference mode couldn't be changed in training.
        with torch.inference_mode(mode=False), torch.no_grad():
            for source, own in sorted(names.items()):
                mine = source == self._comms.global_rank
                sent = [[_on_cpu(self._slots[name].current) for name in own] if mine else None]
                dist.broadcast_object_list(sent, source, group=self._comms.control)
                for name, value in zip(own, sent[0] or [], strict=True):
                    if not mine and value is not None:
                        self._slots[name].put(value)


def _join(prefix: str, attribute: str) -> str:
    return f"{prefix}.{attribute}" if prefix else attribute


def _mark(buffer: Tensor | None) -> tuple[Tensor | None, int]:
    """Return a buffer's tensor and version; a change gives it another one of either."""
    return buffer, 0 if buffer is None or buffer.is_inference() else buffer._version


def _on_cpu(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().cpu()


def _digest(buffer: Tensor | None) -> int:
    value = _on_cpu(buffer)
    if value is None:
        return 0
    return zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
