"""How fetched bytes become tensors again, chunk by chunk, in whatever order they arrive."""

import io
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lightning_hetero.checkpoint.blocks import Buffer
from lightning_hetero.checkpoint.content import RestoredSlice
from lightning_hetero.checkpoint.encoding import SHARED_METADATA, rank_metadata_name
from lightning_hetero.checkpoint.manifest import WEIGHT, PartManifest, Scalar, SliceEntry
from lightning_hetero.checkpoint.recovery_plan import FileRange, whole_blocks
from lightning_hetero.checkpoint.resharding import SliceNeed, Span, Target, find_targets
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.models.stored import SAFETENSORS_DTYPES

__all__ = ["Assembly", "RankNeeds"]


class RankNeeds:
    """All that one rank needs of a checkpoint: slices and metadata files."""

    def __init__(
        self,
        needs: Sequence[SliceNeed],
        manifests: Mapping[int, PartManifest],
        global_rank: int,
        world_size: int,
    ) -> None:
        stored: dict[str, list[tuple[int, SliceEntry]]] = defaultdict(list)
        for part, manifest in sorted(manifests.items()):
            for entry in manifest.slices:
                stored[entry.parameter].append((part, entry))
        self.manifests = manifests
        self.needs = tuple(needs)
        self.targets: list[list[Target]] = []
        self.scalars: list[Mapping[str, Scalar]] = []
        for need in needs:
            targets, scalars = find_targets(need, stored[need.parameter])
            self.targets.append(targets)
            self.scalars.append(scalars)
        self.metadata = self._whole_file(0, SHARED_METADATA)
        same = manifests[0].world_size == world_size
        self.rank_metadata = (
            self._whole_file(global_rank, rank_metadata_name(global_rank)) if same else None
        )

    def blocks(self) -> list[FileRange]:
        """Return the runs of whole blocks to fetch, each byte once."""
        ranges = [s.range for targets in self.targets for target in targets for s in target.spans]
        ranges += [item for item in (self.metadata, self.rank_metadata) if item is not None]
        return whole_blocks(ranges, self.manifests)

    def _whole_file(self, part: int, name: str) -> FileRange:
        return FileRange(part, name, 0, self.manifests[part].file(name).size_bytes)


class Assembly:
    """Buffers for all that a rank needs; chunks may be delivered by several threads at once."""

    def __init__(self, needs: RankNeeds) -> None:
        self._needs = needs
        self._buffers: list[list[torch.Tensor]] = []
        self._spans: dict[tuple[int, str], list[tuple[int, Span, memoryview]]] = defaultdict(list)
        for targets in needs.targets:
            self._buffers.append(
                [self._register(target.size_bytes, target.spans) for target in targets]
            )
        self._metadata = self._register_file(needs.metadata)
        self._rank_metadata = self._register_file(needs.rank_metadata)
        for spans in self._spans.values():
            spans.sort(key=lambda item: (item[0], item[1].range.stop))

    def deliver(self, item: FileRange, data: Buffer) -> None:
        """Copy the bytes of a fetched range to where they belong."""
        source = memoryview(data)
        spans = self._spans[item.part, item.file]
        # Spans of one file may overlap (two needs of the same rows), so look back from the last
        # one that starts before the end of the chunk.
        last = bisect_right(spans, item.stop, key=lambda entry: entry[0])
        for start, span, target in spans[:last]:
            low, high = max(start, item.start), min(span.range.stop, item.stop)
            if low < high:
                to = span.offset + low - start
                target[to : to + high - low] = source[low - item.start : high - item.start]

    def finish(
        self,
    ) -> tuple[tuple[RestoredSlice, ...], Mapping[str, Any], Mapping[str, Any] | None]:
        """Return the slices, the shared metadata and the rank's own, once all is delivered."""
        slices = []
        for need, targets, buffers, scalars in zip(
            self._needs.needs, self._needs.targets, self._buffers, self._needs.scalars, strict=True
        ):
            tensors = {
                target.key: _as_tensor(target, buffer)
                for target, buffer in zip(targets, buffers, strict=True)
            }
            if WEIGHT not in tensors:
                raise CheckpointError(
                    f"The checkpoint has state but no weights of {need.parameter}. Delete it, and "
                    "go on from an older one."
                )
            weight = tensors.pop(WEIGHT)
            slices.append(
                RestoredSlice(
                    parameter=need.parameter, weight=weight, state=tensors, scalars=scalars
                )
            )
        assert self._metadata is not None
        own = None if self._rank_metadata is None else _load(self._rank_metadata)
        return tuple(slices), _load(self._metadata), own

    def _register(self, size_bytes: int, spans: Sequence[Span]) -> torch.Tensor:
        buffer = torch.empty(size_bytes, dtype=torch.uint8)
        view = buffer.numpy().data
        for span in spans:
            self._spans[span.range.part, span.range.file].append((span.range.start, span, view))
        return buffer

    def _register_file(self, item: FileRange | None) -> torch.Tensor | None:
        return None if item is None else self._register(item.stop, [Span(item, 0)])


def _as_tensor(target: Target, buffer: torch.Tensor) -> torch.Tensor:
    tensor = buffer.view(SAFETENSORS_DTYPES[target.dtype]).reshape(target.shape)
    if not target.by_rows or not target.shape:
        return tensor
    tensor = tensor.movedim(0, target.dim)
    need = target.need
    if need.dim != target.dim:
        tensor = tensor.narrow(need.dim, need.start, need.stop - need.start)
    return tensor.contiguous()


def _load(buffer: torch.Tensor) -> Mapping[str, Any]:
    stream = io.BytesIO(buffer.numpy().tobytes())
    loaded: Mapping[str, Any] = torch.load(stream, weights_only=True, map_location="cpu")
    return loaded
