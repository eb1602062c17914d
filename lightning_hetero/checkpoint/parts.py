"""How a part gets into a store: files first, manifest last, from memory, a store or a peer."""

from collections.abc import Iterable, Iterator, Sequence

from lightning_hetero.checkpoint.background import Followed, Progress
from lightning_hetero.checkpoint.blocks import BlockChecksums, Buffer
from lightning_hetero.checkpoint.encoding import FileBody
from lightning_hetero.checkpoint.manifest import (
    CheckpointId,
    FileEntry,
    PartManifest,
    manifest_name,
)
from lightning_hetero.checkpoint.store import Store
from lightning_hetero.checkpoint.transport import Transport, take_turns
from lightning_hetero.core.errors import CheckpointError

__all__ = ["copy_part", "exchange_parts", "write_files", "write_manifest"]

_CHUNK_BYTES = 8 << 20


def write_files(
    store: Store, checkpoint: CheckpointId, bodies: Iterable[FileBody], progress: Progress
) -> None:
    """Write a part's files; `progress` is told of every chunk."""
    for body in bodies:
        store.write(f"{checkpoint.folder}/{body.name}", Followed(body, progress))


def write_manifest(store: Store, manifest: PartManifest) -> None:
    """Make a part exist, once all its files do."""
    store.write(manifest_name(manifest.id, manifest.part), [manifest.encode()])


def copy_part(source: Store, target: Store, manifest: PartManifest, progress: Progress) -> None:
    """Copy a part between stores; CheckpointError if the source turns out corrupt."""
    for entry in manifest.files:
        chunks = Followed(_StoredFile(source, manifest, entry), progress)
        target.write(f"{manifest.id.folder}/{entry.name}", chunks)
    write_manifest(target, manifest)


def exchange_parts(
    transport: Transport,
    targets: Sequence[Sequence[int]],
    manifest: PartManifest,
    *,
    source: Store | None,
    target: Store,
    progress: Progress,
) -> list[str]:
    """Send this rank's part to its targets and keep what others send; all ranks call it.

    Args:
        transport: The ranks.
        targets: For each rank the ranks that keep a copy of its part.
        manifest: This rank's part.
        source: Where this rank has its part; None if it couldn't write it.
        target: Where this rank keeps other ranks' parts.
        progress: Is told of every chunk.

    Returns:
        What went wrong here; the others' transfers go on.
    """
    pairs = [(sender, receiver) for sender, items in enumerate(targets) for receiver in items]
    errors = []
    for sender, receiver in (pairs[index] for index in take_turns(pairs)):
        try:
            if transport.global_rank == sender:
                _send_part(transport, receiver, manifest, source, progress)
            elif transport.global_rank == receiver:
                _receive_part(transport, sender, manifest.id, target, progress)
        except (OSError, CheckpointError) as error:
            errors.append(f"Copy of rank {sender}'s part for rank {receiver}: {error}")
    return errors


class _StoredFile:
    """Chunks of a stored file, compared with its checksums on the way."""

    def __init__(self, store: Store, manifest: PartManifest, entry: FileEntry) -> None:
        self._store = store
        self._manifest = manifest
        self._entry = entry

    def __iter__(self) -> Iterator[Buffer]:
        name = f"{self._manifest.id.folder}/{self._entry.name}"
        chunks = (
            self._store.read(name, start, min(start + _CHUNK_BYTES, self._entry.size_bytes))
            for start in _starts(self._entry)
        )
        yield from _checked(chunks, self._manifest, self._entry)


def _starts(entry: FileEntry) -> range:
    return range(0, entry.size_bytes, _CHUNK_BYTES)


def _checked(
    chunks: Iterable[Buffer], manifest: PartManifest, entry: FileEntry
) -> Iterator[Buffer]:
    """Pass chunks on; raise at the end, before the file exists, unless they are the file."""
    checksums = BlockChecksums(manifest.block_bytes)
    for chunk in chunks:
        checksums.update(chunk)
        yield chunk
    if checksums.finish() != entry.checksums:
        raise CheckpointError(
            f"{entry.name} of {manifest.id} is corrupt at its source; it wasn't copied."
        )


def _send_part(
    transport: Transport,
    receiver: int,
    manifest: PartManifest,
    source: Store | None,
    progress: Progress,
) -> None:
    """Send the manifest, then every chunk in order; nothing in place of what can't be read."""
    if source is None:
        transport.send(b"", receiver)
        raise CheckpointError("there is nothing to send, for it couldn't be written")
    transport.send(manifest.encode(), receiver)
    failure: Exception | None = None
    for entry in manifest.files:
        for start in _starts(entry):
            data = b""
            try:
                stop = min(start + _CHUNK_BYTES, entry.size_bytes)
                data = source.read(f"{manifest.id.folder}/{entry.name}", start, stop)
            except (OSError, CheckpointError) as error:
                failure = error
            transport.send(data, receiver)
            progress.tick()
    if failure is not None:
        raise CheckpointError(f"couldn't be read back: {failure}") from failure


def _receive_part(
    transport: Transport,
    sender: int,
    checkpoint: CheckpointId,
    target: Store,
    progress: Progress,
) -> None:
    """Take all chunks, whatever happens, so that the next transfer finds its own."""
    head = transport.receive(sender)
    if not head:
        raise CheckpointError("the sender has nothing to send")
    manifest = PartManifest.decode(head)
    failure: Exception | None = None
    if (manifest.id, manifest.part) != (checkpoint, sender):
        failure = CheckpointError(
            f"rank {sender} sent part {manifest.part} of {manifest.id}, not its own of {checkpoint}"
        )
    for entry in manifest.files:
        chunks = iter(Followed((transport.receive(sender) for _ in _starts(entry)), progress))
        if failure is None:
            try:
                name = f"{manifest.id.folder}/{entry.name}"
                target.write(name, _checked(chunks, manifest, entry))
            except (OSError, CheckpointError) as error:
                failure = error
        for _ in chunks:
            pass
    if failure is not None:
        raise failure
    write_manifest(target, manifest)
