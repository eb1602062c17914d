"""Decide whose values count for buffers that steps change, and share them with all ranks.

The values of the first pipeline that changes a buffer count; in it, those of the layer's stage or,
for a buffer outside the layers, of the first stage that changes it. All ranks get these values
before an evaluation, a checkpoint, a change of plan and the end.

One device changes a buffer once, with the whole batch. A buffer that several micro-batches change,
or that pipelines change differently, depends on a micro-batch's content, as BatchNorm's statistics
do: it is refused in the first iteration in which this happens, unless the user accepts it.

A buffer that isn't persistent may also be a cache that grows with the longest micro-batch: a new
shape doesn't count as a change. New values do, as with Hugging Face's rotary frequencies that
depend on a batch's length.
"""

import zlib
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout


@dataclass(frozen=True, slots=True)
class BufferChange:
    """One rank's report on a buffer that an iteration has changed."""

    name: str
    is_repeated: bool
    """Whether several of the rank's actions changed it."""
    is_versioned: bool
    """Whether changes increment its version; `buffer.data.copy_(...)` doesn't."""
    digest: int
    """Digest of the new values. 0 if they weren't compared: that is done in the first iteration,
    and for caches in every one."""


@dataclass(eq=False)
class _Buffer:
    """One of the module's buffers, and what is known of its changes."""

    name: str
    owner: nn.Module
    attribute: str
    layer: int | None
    is_cache: bool
    """Whether it isn't persistent, so that no `state_dict` has it."""
    seen: tuple[Tensor | None, int] = (None, 0)
    """Its tensor and that tensor's version when it was last compared. A step that changes the
    buffer changes the version, or puts another tensor in its place."""
    value: Tensor | None = None
    """A copy of its last values, in iterations in which values are compared."""
    count: int = 0
    """Number of the iteration's actions that have changed it."""
    is_unversioned: bool = False
    """Whether its values changed and its version didn't, in the first iteration of any rank."""
    is_rewritten: bool = False
    """Whether its version changed and its values didn't, in a first iteration."""
    source: int | None = None
    """The rank whose values all ranks get at the next `share`; None if it hasn't changed since the
    last one."""

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

    def begin(self, *, compares: bool) -> None:
        """Note its state before an iteration."""
        self.count, self.seen, self.value = 0, self._now(), None
        if self.seen[0] is not None and (compares or self.is_rewritten):
            self.value = self.seen[0].clone()

    def look(self) -> None:
        """Count one change if the last action has changed it."""
        (old, version), self.seen = self.seen, self._now()
        buffer = self.seen[0]
        is_new = buffer is not old or self.seen[1] != version
        if is_new or self.value is not None:
            self.count += self._has_changed(old, buffer, is_new=is_new)

    def _has_changed(self, old: Tensor | None, buffer: Tensor | None, *, is_new: bool) -> bool:
        if old is None or buffer is None:
            return is_new and not self.is_cache
        if self.is_cache and buffer.shape != old.shape:
            self.value = None
            return False
        if self.value is None:
            return is_new and not (self.is_cache and buffer is not old and torch.equal(buffer, old))
        is_equal = torch.equal(buffer, self.value)
        self.is_rewritten |= is_equal and is_new
        self.is_unversioned |= not (is_equal or is_new)
        self.value = self.value if is_equal else buffer.clone()
        return not is_equal

    def _now(self) -> tuple[Tensor | None, int]:
        buffer = self.current
        return buffer, 0 if buffer is None or buffer.is_inference() else buffer._version


class BufferWatch:
    """Finds out which buffers of a module steps change, and keeps them equal on all ranks.

    Every rank calls `begin` before an iteration, `look` after each action, `report` before the
    agreement and `settle` after it, and `share` where all ranks need the same values.

    Buffers whose first values differ between ranks become rank 0's. Only if they `may_differ` may
    buffers depend on a micro-batch's content.
    """

    def __init__(
        self, module: nn.Module, layout: ModelLayout, comms: Communicators, *, may_differ: bool
    ) -> None:
        self._comms = comms
        self._may_differ = may_differ
        layers = {id(part): i for i, layer in enumerate(layout.layers) for part in layer.modules()}
        found = [
            _Buffer(
                f"{prefix}.{attribute}" if prefix else attribute,
                owner,
                attribute,
                layers.get(id(owner)),
                attribute in owner._non_persistent_buffers_set,
            )
            for prefix, owner in module.named_modules()
            for attribute, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._buffers = {buffer.name: buffer for buffer in found}
        self._begun: set[int] = set()
        self._is_first = True
        self._share_drawn()

    def _share_drawn(self) -> None:
        """Take from rank 0 the buffers whose first values differ between ranks; collective."""
        digests = {name: _digest(buffer.current) for name, buffer in self._buffers.items()}
        gathered = self._comms.gather_objects(digests)
        for name, buffer in self._buffers.items():
            if any(other.get(name) != gathered[0][name] for other in gathered):
                buffer.source = 0
        self.share()

    # -- an iteration ---------------------------------------------------------------------------

    def begin(self, phase: int) -> None:
        """Note the buffers' state before an iteration of a phase, such as training."""
        self._is_first = phase not in self._begun
        self._begun.add(phase)
        for buffer in self._buffers.values():
            buffer.begin(compares=self._is_first)

    def look(self) -> None:
        """Count the buffers that the last action has changed."""
        for buffer in self._buffers.values():
            buffer.look()

    def report(self, layers: Container[int]) -> tuple[BufferChange, ...]:
        """Return the changed buffers of these layers, and of modules outside the layers."""
        changes = []
        for name, buffer in self._buffers.items():
            buffer.value, count = None, buffer.count or buffer.is_unversioned
            if count and (buffer.layer is None or buffer.layer in layers):
                digest = _digest(buffer.current) if self._is_first or buffer.is_cache else 0
                changes.append(BufferChange(name, count > 1, not buffer.is_unversioned, digest))
        return tuple(changes)

    def settle(self, reports: Mapping[int, Sequence[BufferChange]], plan: ParallelPlan) -> None:
        """Decide whose buffers count; all ranks decide the same.

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
            buffer = self._buffers[name]
            buffer.is_unversioned |= not all(item.is_versioned for _, item in changes.values())
            buffer.source = changes[min(changes)][0]
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
        return not any(b.is_unversioned or b.source is not None for b in self._buffers.values())

    def share(self) -> None:
        """Give all ranks the values of changed buffers; called by every rank."""
        changed: dict[int, list[_Buffer]] = defaultdict(list)
        for _, buffer in sorted(self._buffers.items()):
            if buffer.source is not None:
                changed[buffer.source].append(buffer)
                buffer.source = None
        if self._comms.world_size == 1:
            return
        # Buffers made in an evaluation's inference mode couldn't be changed in training.
        with torch.inference_mode(mode=False), torch.no_grad():
            for source, own in sorted(changed.items()):
                mine = source == self._comms.global_rank
                sent = [[_on_cpu(buffer.current) for buffer in own] if mine else None]
                dist.broadcast_object_list(sent, source, group=self._comms.control)
                for buffer, value in zip(own, sent[0] or [], strict=True):
                    if not mine and value is not None:
                        buffer.put(value)


def _on_cpu(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().cpu()


def _digest(buffer: Tensor | None) -> int:
    value = _on_cpu(buffer)
    if value is None:
        return 0
    return zlib.crc32(value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
