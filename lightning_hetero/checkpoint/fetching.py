"""How one rank carries out its share of a table of fetches.

Threads read from the own node's tiers and from the remote store. Meanwhile the calling thread sends
to peers and receives from them in the order of the table, with the next reads for peers under way.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from lightning_hetero.checkpoint.background import BackgroundThread, Progress
from lightning_hetero.checkpoint.blocks import Buffer, first_corrupt_block
from lightning_hetero.checkpoint.inventory import Holder
from lightning_hetero.checkpoint.manifest import PartManifest
from lightning_hetero.checkpoint.recovery_plan import Fetch, FileRange, Source
from lightning_hetero.checkpoint.rounds import Rounds
from lightning_hetero.checkpoint.tiers import Tier
from lightning_hetero.checkpoint.transport import Transport

__all__ = ["Failure", "Fetcher"]

_LOCAL_READERS = 2
_REMOTE_READERS = 8
"""One connection to an object store carries much less than the link."""
_READ_AHEAD = 2
_STALL_S = 300.0
"""Seconds after which sources that give nothing more are given up."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A byte range that a source couldn't give."""

    range: FileRange
    holder: Holder
    why: str


class Fetcher:
    """Runs tables of fetches for one rank; memory is bounded by readers × chunk."""

    def __init__(
        self,
        transport: Transport,
        tier_of: Callable[[Holder], Tier | None],
        manifests: Mapping[int, PartManifest],
        deliver: Callable[[FileRange, Buffer], None],
    ) -> None:
        self._transport = transport
        self._tier_of = tier_of
        self._manifests = manifests
        self._deliver = deliver
        self._late: set[Fetch] = set()
        self.bytes_by_source: dict[Source, int] = defaultdict(int)

    def run(self, fetches: Sequence[Fetch]) -> list[Failure]:
        """Carry out this rank's fetches; return those that failed. All ranks call it."""
        rank = self._transport.global_rank
        own = [f for f in fetches if f.receiver == rank and f.reader == rank]
        peers = [f for f in fetches if f.receiver != f.reader and rank in (f.receiver, f.reader)]
        pools = [ThreadPoolExecutor(n) for n in (_LOCAL_READERS, _REMOTE_READERS, 1)]
        local, remote, ahead = pools
        results = {
            fetch: (remote if fetch.source is Source.REMOTE else local).submit(self._fetch, fetch)
            for fetch in own
        }
        failures = self._exchange(peers, ahead)
        failures += self._await_own(results)
        for pool in pools:
            # A read that hangs is left to its thread.
            pool.shutdown(wait=False, cancel_futures=True)
        done = {failure.range for failure in failures}
        for fetch in fetches:
            if fetch.receiver == rank and fetch.range not in done:
                self.bytes_by_source[fetch.source] += fetch.range.stop - fetch.range.start
        return failures

    def _await_own(self, results: Mapping[Fetch, "Future[Failure | None]"]) -> list[Failure]:
        """Wait until all ranks have read what they read for themselves, however slowly."""
        thread = BackgroundThread("checkpoint-fetch")

        def collect() -> None:
            for result in results.values():
                result.result()
                thread.progress.tick()

        rounds = Rounds(self._transport, Progress(), _STALL_S)
        rounds.finish(thread.submit(collect), thread, lambda _: {})
        thread.finish()
        late = f"didn't answer for {_STALL_S:g} s"
        self._late |= {fetch for fetch, result in results.items() if not result.done()}
        outcomes = [
            Failure(fetch.range, fetch.holder, late) if fetch in self._late else result.result()
            for fetch, result in results.items()
        ]
        return [failure for failure in outcomes if failure is not None]

    def _fetch(self, fetch: Fetch) -> Failure | None:
        data, why = self._read(fetch)
        if fetch in self._late:
            # By now another source has given it, and what became of it may be in use.
            why = "this came too late"
        return Failure(fetch.range, fetch.holder, why) if why else self._accept(fetch, data)

    def _exchange(self, peers: Sequence[Fetch], ahead: ThreadPoolExecutor) -> list[Failure]:
        """Send and receive in order; an unreadable range is sent as no bytes at all."""
        rank = self._transport.global_rank
        unread = deque(fetch for fetch in peers if fetch.reader == rank)
        reading: deque[Future[tuple[bytes, str]]] = deque()
        failures: list[Failure] = []
        for fetch in peers:
            while unread and len(reading) < _READ_AHEAD:
                reading.append(ahead.submit(self._read, unread.popleft()))
            if fetch.reader == rank:
                data, why = reading.popleft().result()
                # One byte says whether the range follows or the reason why not.
                self._transport.send(b"!" + why.encode() if why else b"=" + data, fetch.receiver)
                continue
            answer = self._transport.receive(fetch.reader)
            failure = (
                Failure(fetch.range, fetch.holder, answer[1:].decode())
                if answer.startswith(b"!")
                else self._accept(fetch, memoryview(answer)[1:])
            )
            if failure:
                failures.append(failure)
        return failures

    def _read(self, fetch: Fetch) -> tuple[bytes, str]:
        """Return the bytes, or no bytes and what went wrong."""
        tier = self._tier_of(fetch.holder)
        if tier is None:
            return b"", "this rank doesn't reach it"
        item = fetch.range
        name = f"{self._manifests[item.part].id.folder}/{item.file}"
        try:
            return tier.store.read(name, item.start, item.stop), ""
        except Exception as error:
            # Stores raise their client library's own types; whatever it is, try another source.
            return b"", f"{type(error).__name__}: {error}"

    def _accept(self, fetch: Fetch, data: Buffer) -> Failure | None:
        """Check the bytes and hand them on."""
        item = fetch.range
        if len(data) != item.stop - item.start:
            why = f"got {len(data)} of {item.stop - item.start} bytes at {item.start}"
            return Failure(item, fetch.holder, why)
        manifest = self._manifests[item.part]
        block = first_corrupt_block(
            data,
            item.start,
            manifest.file(item.file).checksums,
            block_bytes=manifest.block_bytes,
        )
        if block is not None:
            why = f"the checksum of block {block} ({manifest.block_bytes} bytes each) is wrong"
            return Failure(item, fetch.holder, why)
        self._deliver(item, data)
        return None
