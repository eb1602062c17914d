"""How one rank carries out its share of a table of fetches.

Threads read from the own node's tiers and from the remote store. Meanwhile the calling thread lets
peers' bytes travel in lockstep, each reader's next chunks being read ahead.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_hetero.checkpoint.deadlines import BackgroundThread, Progress
from lightning_hetero.checkpoint.lockstep import Lockstep
from lightning_hetero.checkpoint.manifest import PartManifest
from lightning_hetero.checkpoint.parts import fault_in
from lightning_hetero.checkpoint.recovering.sources import Fetch, FileRange
from lightning_hetero.checkpoint.store import Buffer
from lightning_hetero.checkpoint.tiers import Holder, Source, Tier
from lightning_hetero.checkpoint.transport import Rounds, Transport

if TYPE_CHECKING:
    from concurrent.futures import Future

__all__ = ["Failure", "Fetcher"]

_LOCAL_READERS = 2
_REMOTE_READERS = 8
"""One connection to an object store carries much less than the link."""
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
        local = BackgroundThread("checkpoint-fetch", _LOCAL_READERS)
        remote = BackgroundThread("checkpoint-fetch", _REMOTE_READERS)
        results = {
            fetch: (remote if fetch.source is Source.REMOTE else local).submit(self._fetch, fetch)
            for fetch in own
        }
        failures = self._exchange([f for f in fetches if f.receiver != f.reader])
        failures += self._await_own(results)
        for threads in (local, remote):
            threads.finish()
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
                result.exception()
                thread.progress.tick()

        rounds = Rounds(self._transport, Progress(), _STALL_S)
        rounds.finish(thread.submit(collect), thread, lambda _: {})
        thread.finish()
        late = f"didn't answer for {_STALL_S:g} s"
        self._late |= {fetch for fetch, result in results.items() if not result.done()}
        for result in results.values():
            result.cancel()
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

    def _exchange(self, fetches: Sequence[Fetch]) -> list[Failure]:
        """Read for peers and take what they read; what a rank can't read it says in its place."""
        by_pair: dict[tuple[int, int], list[Fetch]] = defaultdict(list)
        for fetch in fetches:
            by_pair[fetch.reader, fetch.receiver].append(fetch)
        pairs = list(by_pair)
        outcomes: dict[Fetch, Failure | None] = {}

        def produce(index: int) -> Iterator[bytes]:
            for fetch in by_pair[pairs[index]]:
                data, why = self._read(fetch)
                # One byte says whether the range follows or the reason why not.
                yield b"!" + why.encode() if why else b"=" + data

        def consume(index: int, answers: Iterator[bytes]) -> None:
            for fetch, answer in zip(by_pair[pairs[index]], answers, strict=True):
                if answer.startswith(b"!"):
                    failure = Failure(fetch.range, fetch.holder, answer[1:].decode())
                    outcomes[fetch] = failure
                else:
                    outcomes[fetch] = self._accept(fetch, memoryview(answer)[1:])

        lockstep = Lockstep(self._transport, stall_s=_STALL_S, progress=Progress())
        why = lockstep.run(pairs, produce, consume)
        for index, pair in enumerate(pairs):
            if pair[1] == self._transport.global_rank:
                for fetch in by_pair[pair]:
                    missing = Failure(fetch.range, fetch.holder, why.get(index, "nothing came"))
                    outcomes.setdefault(fetch, missing)
        return [failure for failure in outcomes.values() if failure is not None]

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
        manifest = self._manifests[item.part]
        entry = manifest.file(item.file)
        why = fault_in(data, item.start, item.stop, entry, manifest.block_bytes)
        if why:
            return Failure(item, fetch.holder, why)
        self._deliver(item, data)
        return None
