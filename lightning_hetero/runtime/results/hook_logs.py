"""Check that hooks log the same values for an epoch on every rank, without a collective.

A hook may log on some ranks only, so rank 0 waits for no other rank: it writes its values into the
run's store, and ranks that log under the same name compare theirs with them.
"""

import time
from collections import Counter
from datetime import timedelta
from math import isclose, isnan

from torch.distributed.distributed_c10d import Store

from lightning_hetero.core.errors import StepError

__all__ = ["HookLogs"]

_TOLERANCE = 1e-5
"""Relative; unequal devices round differently."""
_NUM_KEPT = 8
"""Values of a name in the store: no rank lags further than the end of an epoch."""


class HookLogs:
    """The comparison on one rank.

    Args:
        store: A store of this run alone.
        global_rank: This rank.
        timeout: How long to wait for rank 0 to log the same name.
    """

    def __init__(self, store: Store, *, global_rank: int, timeout: timedelta) -> None:
        self._store = store
        self._global_rank = global_rank
        self._timeout = timeout
        self._counts: Counter[str] = Counter()

    def compare(self, name: str, value: float) -> float:
        """Return rank 0's value under a name, if this rank's is the same; waits for rank 0.

        Raises:
            StepError: It isn't, or rank 0 logs nothing under that name within the timeout.
        """
        count = self._counts[name]
        self._counts[name] += 1
        key = f"{name}/{count}"
        if self._global_rank == 0:
            self._store.set(key, value.hex())
            if count >= _NUM_KEPT:
                self._store.delete_key(f"{name}/{count - _NUM_KEPT}")
            return value
        self._wait_for(key, name)
        first = float.fromhex(self._store.get(key).decode())
        both_nan = isnan(value) and isnan(first)
        if both_nan or isclose(value, first, rel_tol=_TOLERANCE, abs_tol=1e-12):
            return first
        raise StepError(
            f"A hook logs {name!r} with different values: {first:g} on rank 0, {value:g} on rank "
            f"{self._global_rank}. In a hook all ranks have the same only from what steps return, "
            "log or append to lists of the module, and from metrics. Log in the step, or say in "
            "`self.log` what to do: sync_dist=True reduces, rank_zero_only=True takes rank 0's."
        )

    def _wait_for(self, key: str, name: str) -> None:
        # Without a blocking call, which would keep the store from the watch over other ranks.
        end, pause_s = time.monotonic() + self._timeout.total_seconds(), 0.001
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise StepError(
                    f"Rank {self._global_rank} logs {name!r} in a hook, and rank 0 doesn't. Log it "
                    "on every rank, or let `self.log` have sync_dist=True on all of them."
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)
