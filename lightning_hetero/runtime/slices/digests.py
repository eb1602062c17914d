"""Compute digests of tensors, and compare slices with their standbys' copies.

A digest is the sum of the elements' bits as integers, each times an odd number given by its index.
A slice and its copy get the same gradients and make the same steps, so they are equal bit for bit
unless a device silently computes wrongly.
"""

import zlib
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_hetero.core.errors import StepError
from lightning_hetero.exchange.owners import list_owners
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import SliceStore

_LOOKED_AT = frozenset({1, 100, 10_000, 1_000_000})
_AT_ONCE = 2**22
"""Number of values that are converted to 8 bytes at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digest of each tensor; the host waits for its device.

    Digests find changes that increment no version, such as `weight.data.clamp_(...)` in a forward.
    """
    digests = list(map(_digest_of, tensors.values()))
    numbers = torch.stack(digests).tolist() if digests else []
    return dict(zip(tensors, numbers, strict=True))


def _digest_of(rows: Tensor) -> Tensor:
    bits = rows.detach().contiguous().view(_BITS[rows.element_size()]).flatten()
    digest = torch.zeros((), dtype=torch.int64, device=rows.device)
    for first in range(0, len(bits), _AT_ONCE):
        part = bits[first : first + _AT_ONCE].long()
        factors = torch.arange(2 * first + 1, 2 * (first + len(part)), 2, device=rows.device)
        digest += (part * factors).sum()
    return digest


def has_costly_checks(iteration: int) -> bool:
    """Whether costly checks, such as digests of all weights, run in an iteration, counted from 1.

    They run in few iterations, so that steps stay fast. A fault that occurs in every iteration is
    found in the first.
    """
    return iteration in _LOOKED_AT


class StandbyCheck:
    """Compares slices and standbys every `num_steps` optimizer steps; 0 never compares.

    Called by every rank alike.
    """

    def __init__(self, store: SliceStore, comms: Communicators, *, num_steps: int) -> None:
        self._store = store
        self._comms = comms
        self._num_steps = num_steps if store.has_standbys else 0
        self._steps = 0

    def after_step(self) -> None:
        """Count an optimizer's step, and compare if it is due; called by all ranks.

        Raises:
            StepError: A slice and its standby differ; on every rank.
        """
        self._steps += 1
        if not self._num_steps or self._steps % self._num_steps:
            return
        everyone = self._comms.gather_objects(self._digests_by_pair())
        differing = [
            (owner, standby)
            for rank, found in enumerate(everyone)
            for (owner, standby), digest in found.items()
            if rank == standby and digest != everyone[owner][owner, standby]
        ]
        if differing:
            raise _difference(differing, self._steps)

    def _digests_by_pair(self) -> dict[tuple[int, int], int]:
        """Return a digest of all that the ranks of each pair keep, if this rank is in the pair."""
        shared: dict[tuple[int, int], dict[str, Tensor]] = defaultdict(dict)
        for names, items in list_owners(self._store.slices):
            for item in items:
                if item.standby is None or self._store.global_rank not in item.ranks:
                    continue
                shared[item.owner, item.standby] |= {
                    f"{name} {item.start}": self._store.rows(
                        name, self._store.masters[name], item.start, item.stop
                    )
                    for name in names
                }
        return {pair: zlib.crc32(repr(digests_of(rows)).encode()) for pair, rows in shared.items()}


def _difference(differing: list[tuple[int, int]], num_steps: int) -> StepError:
    pairs = ", ".join(f"of rank {owner} on its standby {standby}" for owner, standby in differing)
    common = frozenset.intersection(*map(frozenset, differing))
    suspect = f" Rank {min(common)} is in all of them." if len(common) == 1 else ""
    return StepError(
        f"After optimizer step {num_steps} of this run slices differ from their copies: {pairs}."
        f"{suspect} Both got the same gradients and made the same steps, so one "
        "of the devices computes or stores wrongly, or a hook has changed slices by something "
        "that isn't the same on both ranks. Test the devices, and go on from an earlier "
        "checkpoint without the faulty one."
    )
