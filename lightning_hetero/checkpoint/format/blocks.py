"""Checksums of files, block by block: one CRC-32 for every `BLOCK_BYTES`.

CRC-32 finds every flipped bit, every burst of up to 32 bits, and all but 2⁻³² of anything else in a
block; of the standard library's checksums it is by far the fastest (measured on one core: crc32
3.3, adler32 2.8, sha256 1.4, blake2b 0.7 GB/s). It guards against faults, not against forgery.
"""

import zlib
from collections.abc import Sequence
from typing import TypeAlias

from lightning_hetero.checkpoint.format.manifest import FileEntry

__all__ = [
    "BLOCK_BYTES",
    "BlockChecksums",
    "Buffer",
    "align_to_blocks",
    "fault_in",
    "first_corrupt_block",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

BLOCK_BYTES = 1 << 20
"""Bytes that one checksum covers: a partial read is rounded to at most two blocks more."""


class BlockChecksums:
    """Checksums of the blocks of a stream that arrives in chunks of any size."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._done: list[int] = []
        self._crc = 0
        self._filled_bytes = 0

    def update(self, chunk: Buffer) -> None:
        """Take the next bytes of the stream."""
        view = memoryview(chunk).cast("B")
        position = 0
        while position < len(view):
            part = view[position : position + self._block_bytes - self._filled_bytes]
            self._crc = zlib.crc32(part, self._crc)
            self._filled_bytes += len(part)
            position += len(part)
            if self._filled_bytes == self._block_bytes:
                self._close_block()

    def finish(self) -> tuple[int, ...]:
        """Return the checksums of all blocks; the stream has ended."""
        if self._filled_bytes:
            self._close_block()
        return tuple(self._done)

    def _close_block(self) -> None:
        self._done.append(self._crc)
        self._crc = self._filled_bytes = 0


def align_to_blocks(start: int, stop: int, *, block_bytes: int, size_bytes: int) -> tuple[int, int]:
    """Return the smallest run of whole blocks that holds bytes [start, stop)."""
    return (
        start - start % block_bytes,
        min(size_bytes, -(-stop // block_bytes) * block_bytes),
    )


def first_corrupt_block(
    data: Buffer, start: int, checksums: Sequence[int], *, block_bytes: int
) -> int | None:
    """Return the index of the first block of `data` that doesn't match, or None.

    Args:
        data: Bytes of a file from `start` on, up to a block's end or the file's.
        start: A multiple of `block_bytes`.
        checksums: Of all blocks of the file.
        block_bytes: Bytes that one checksum covers.
    """
    view = memoryview(data).cast("B")
    first = start // block_bytes
    for index in range(-(-len(view) // block_bytes)):
        block = view[index * block_bytes : (index + 1) * block_bytes]
        if zlib.crc32(block) != checksums[first + index]:
            return first + index
    return None


def fault_in(data: Buffer, start: int, stop: int, entry: FileEntry, block_bytes: int) -> str:
    """Return what is wrong with bytes [start, stop), whole blocks, of a file; "" if nothing is."""
    if len(data) != stop - start:
        return f"got {len(data)} of {stop - start} bytes at {start}"
    if not entry.checksums:  # Live memory has none.
        return ""
    block = first_corrupt_block(data, start, entry.checksums, block_bytes=block_bytes)
    if block is None:
        return ""
    return f"the checksum of block {block} ({block_bytes} bytes each) is wrong"
