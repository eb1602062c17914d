"""Compare each slice with its standby's copy, to find devices that silently compute wrongly.

Both copies get the same gradients and make the same steps, so they are equal bit for bit. Their
digests are compared: one pass over the slices, and 8 bytes for each pair of ranks.
"""

import socket
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lightning_hetero.core.errors import StepError
from lightning_hetero.core.owners import list_owners
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.digests import digest_of
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["StandbyCheck"]

_Pair = tuple[int, int]
"""(owner, standby)"""


@dataclass(frozen=True, kw_only=True)
class _Account:
    """One rank's account of its slices."""

    device: str
    digests: dict[_Pair, dict[str, int]]
    """Digests by pair that this rank is in, then by the slices that both ranks keep."""


class StandbyCheck:
    """Compares slices and standbys every few optimizer steps; called by every rank alike.

    Args:
        store: This rank's slices.
        comms: The communicators.
        num_steps: Steps from one comparison to the next; 0 never compares.
    """

    def __init__(self, store: SliceStore, comms: Communicators, *, num_steps: int) -> None:
        self._store = store
        self._comms = comms
        self._num_steps = num_steps if store.has_standbys else 0
        self._steps = 0

    def _shared(self) -> dict[_Pair, list[tuple[str, int, int]]]:
        """Return, by pair that this rank is in: (parameter, first row, last row + 1) of both."""
        shared: dict[_Pair, list[tuple[str, int, int]]] = defaultdict(list)
        for names, items in list_owners(self._store.slices):
            for item in items:
                if item.standby is not None and self._store.global_rank in item.keepers:
                    rows = [(name, item.start, item.stop) for name in names]
                    shared[item.owner, item.standby] += rows
        return shared

    def after_step(self) -> None:
        """Count an optimizer's step, and compare if it is due; then it is collective.

        Raises:
            StepError: A slice and its standby differ; on every rank.
        """
        self._steps += 1
        if self._num_steps and self._steps % self._num_steps == 0:
            self.compare()

    def compare(self) -> None:
        """Compare all slices with their standbys; collective over all ranks.

        Raises:
            StepError: They differ; on every rank.
        """
        own = self._account()
        short = {pair: zlib.crc32(repr(found).encode()) for pair, found in own.digests.items()}
        everyone = self._comms.gather_objects(short)
        differing = [
            (owner, standby)
            for rank, found in enumerate(everyone)
            for (owner, standby), digest in found.items()
            if rank == standby and digest != everyone[owner][owner, standby]
        ]
        if differing:
            raise _difference(differing, self._comms.gather_objects(own), self._steps)

    def _account(self) -> _Account:
        digests: dict[_Pair, dict[str, int]] = {}
        for pair, shared in self._shared().items():
            found = [
                digest_of(self._store.rows(name, self._store.masters[name], start, stop))
                for name, start, stop in shared
            ]
            values = torch.stack(found).tolist()
            names = [f"{name} (rows {start} to {stop - 1})" for name, start, stop in shared]
            digests[pair] = dict(zip(names, values, strict=True))
        place = f"{self._store.device} on {socket.gethostname()}"
        return _Account(device=place, digests=digests)


def _difference(
    differing: Sequence[tuple[int, int]], accounts: Sequence[_Account], num_steps: int
) -> StepError:
    lines = []
    for owner, standby in differing:
        first, second = (accounts[rank].digests[owner, standby] for rank in (owner, standby))
        names = [name for name, digest in first.items() if second.get(name) != digest]
        lines.append(
            f"rank {owner} ({accounts[owner].device}) and rank {standby} "
            f"({accounts[standby].device}), which stands by for it, in {len(names)} slices "
            f"such as {names[0]}"
        )
    pairs = {frozenset(pair) for pair in differing}
    common = frozenset.intersection(*pairs)
    suspect = f" Rank {min(common)} is in all of them." if len(common) == 1 else ""
    return StepError(
        f"After optimizer step {num_steps} of this run slices differ from their copies: "
        f"{'; '.join(lines)}.{suspect} Both got the same gradients and made the same steps, so one "
        "of the devices computes or stores wrongly, or a hook has changed slices by something "
        "that isn't the same on both ranks. Test the devices, and go on from an earlier "
        "checkpoint without the faulty one."
    )
