"""Explain what filled a device that ran out of memory, and correct the plans of later starts.

The error remains torch's own. A note is added to it, and to the errors of other ranks: the stage,
and the predicted and actual bytes, term by term. A correction for later plans is written to the
folder of measured profiles (`runtime.setup.profile_cache`).
"""

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lightning_hetero.autoplan.summary import StartUp
from lightning_hetero.core.places import usual_held
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.texts import format_table
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.simulator import TERM_NAMES, MemoryCorrection, MemoryTerms

_MIB = 2**20
_OF_CPU = "can't allocate memory"
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": _MIB, "GiB": 2**30}
_REQUEST = re.compile(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed: torch's, its CPU allocator's or Python's."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _OF_CPU in str(error)


def requested_bytes(error: BaseException) -> int:
    """Return the bytes of the allocation that failed, 0 if the error doesn't say."""
    found = _REQUEST.search(str(error))
    return 0 if found is None else int(float(found[1]) * _UNITS[found[2]])


@dataclass(frozen=True, kw_only=True)
class OutOfMemory:
    """A rank's memory when an allocation failed.

    Let P_s be the predicted bytes of states, P_m those of all micro-batches, and P_m(k) those of
    the k micro-batches that were in flight. The correction factor is the number of bytes that were
    needed besides states, divided by P_m(k). The corrected peak P_s + factor · P_m is larger than
    the corrected usable memory of the device, so no planner chooses the failed plan again.
    """

    predicted: MemoryTerms
    """The predicted peak of its stage; only states if nothing more was predicted."""
    live_bytes: int
    """Bytes that were in use."""
    requested_bytes: int
    """Bytes of the allocation that failed; 0 if unknown."""
    state_bytes: int
    """Bytes in use that belonged to weights, gradients and owned states."""
    usable_bytes: float
    """Bytes of the device that the plan expected to be free to use."""
    in_flight: float = 1.0
    """Micro-batches in flight at the failure, divided by the plan's maximum: above 0, up to 1."""

    def correct(self, known: MemoryCorrection) -> MemoryCorrection:
        """Return the correction for planners to apply from now on.

        Args:
            known: The correction that was already part of the prediction.
        """
        predicted, needed = self.predicted, self.live_bytes + self.requested_bytes
        passing = predicted.recomputed + predicted.head + predicted.messages
        so_far = predicted.activations * self.in_flight + passing
        if so_far <= 0:
            return MemoryCorrection(usable_bytes=self.live_bytes).join(known)
        factor = max(1.0, (needed - self.state_bytes) / so_far)
        peak = predicted.states + max(
            predicted.total - predicted.states, factor * (predicted.activations + passing)
        )
        usable = None
        if min(needed, peak) <= self.usable_bytes:
            # The device has less memory than expected; what was in use did fit.
            usable = max(0, min(self.live_bytes, math.ceil(peak) - 1))
        found = MemoryCorrection(
            activation_factor=factor * known.activation_factor, usable_bytes=usable
        )
        return found.join(known)


class _Live(NamedTuple):
    """Bytes of the states in a rank's memory, by the names of `MemoryTerms`."""

    weights: int
    gradients: int
    owned: int

    @classmethod
    def of(cls, engine: Engine, optimizers: Iterable[Optimizer]) -> "_Live":
        """Count each storage once; a slice that is a view of a weight counts as weight."""
        shards = list(engine.plans.running.weights.shards.values())
        masters = list(engine.store.masters.values())
        states = [list(optimizer.state.values()) for optimizer in optimizers]
        seen: set[int] = set()
        return cls(
            weights=_count(shards, seen),
            gradients=_count([shard.grad for shard in shards], seen),
            owned=_count(
                [masters, [item.grad for item in masters], engine.gradients.by_name, states], seen
            ),
        )

    @property
    def states(self) -> int:
        """Bytes of all of them."""
        return self.weights + self.gradients + self.owned


def _count(tree: object, seen: set[int]) -> int:
    total = 0
    for item in tree_leaves(tree):
        if isinstance(item, Tensor) and not item.is_meta:
            storage = item.untyped_storage()
            total += 0 if storage._cdata in seen else storage.nbytes()
            seen.add(storage._cdata)
    return total


class MemoryWatch:
    """Explains out-of-memory errors on one rank, and says whether another plan fits.

    Args:
        start: What was known about the run when it began.
        engine: The run's engine.
        optimizers: Returns the run's optimizers.
    """

    def __init__(
        self, start: StartUp, engine: Engine, optimizers: Callable[[], Sequence[Optimizer]]
    ) -> None:
        self._start = start
        self._engine = engine
        self._optimizers = optimizers
        self._has_explained = False
        self._elsewhere = max(0, _resident_bytes() - _Live.of(engine, ()).states)

    def has_room(self, plan: ParallelPlan) -> bool:
        """Return whether each rank has enough memory for its place in a plan."""
        start = self._start
        return (start if start.plan == self._engine.plan else self._now()).has_room(plan)

    def in_use(self) -> tuple[int, float]:
        """Return the bytes in use (on CUDA the peak so far) and the predicted peak; or 0."""
        place, device = self._engine.place, self._engine.device
        if device.type == "cuda":
            used = torch.cuda.max_memory_allocated(device)
        else:
            used = max(0, _resident_bytes() - self._elsewhere)
        if place is None or self._start.plan != self._engine.plan:
            return used, 0.0
        facts = self._start.stage_facts[place.pipeline_index][place.stage_index]
        return used, facts.used_bytes or 0.0

    def _now(self) -> StartUp:
        """Return what is known about the plan that is running now."""
        return replace(self._start, plan=self._engine.plan)

    @contextmanager
    def explaining(self, *, trains: bool) -> Iterator[None]:
        """In this context, pass errors of an iteration to `explain`."""
        try:
            yield
        except Exception as error:
            self.explain(error, trains=trains)
            raise

    def explain(self, error: BaseException, *, trains: bool = False) -> None:
        """Explain the run's first out-of-memory error in a note, and store the correction.

        Args:
            error: Any error that ends the run; others than out of memory are ignored.
            trains: Whether it occurred in a training iteration, when activations are in memory;
                between iterations, or in evaluation, their room is free.
        """
        if self._has_explained or not is_out_of_memory(error):
            return
        self._has_explained = True
        # The user must see this error even if explaining it fails.
        try:
            error.add_note(self._explain(error, trains=trains))
        except Exception as problem:
            error.add_note(f"What filled the device is unknown: {problem!r}")

    def _explain(self, error: BaseException, *, trains: bool) -> str:
        engine, live = self._engine, _Live.of(self._engine, self._optimizers())
        place, rank = engine.place, engine.comms.global_rank
        total, requested = self._live_bytes(error)
        there = f"{total / _MIB:,.1f} MiB were there"
        there += f", {requested:,} bytes more asked for." if requested else "."
        if place is None:
            return f"Rank {rank}, which has no layers, is out of memory: {there}"
        start = self._now()
        facts = start.stage_facts[place.pipeline_index][place.stage_index]
        lines = [
            f"Stage {place.stage_index} of pipeline {place.pipeline_index} (rank {rank}, "
            f"{facts.device}) is out of memory: {there}",
            _table(facts.memory or MemoryTerms(), live, total),
        ]
        if facts.usable_bytes is not None and facts.memory is not None:
            failure = OutOfMemory(
                predicted=facts.memory,
                live_bytes=total,
                requested_bytes=requested,
                state_bytes=live.states,
                usable_bytes=facts.usable_bytes,
                in_flight=self._share_in_flight() if trains else 1.0,
            )
            lines += self._keep(failure.correct(start.known_correction), start.known_correction)
        return "\n".join(lines)

    def _share_in_flight(self) -> float:
        """Return the micro-batches in flight on this rank, as a share of its maximum."""
        engine, place = self._engine, self._engine.place
        assert place is not None
        workers = engine.plan.pipelines[place.pipeline_index].workers
        count, chunks = engine.num_microbatches[place.pipeline_index], len(place.chunks)
        usual = usual_held(workers)[workers[place.stage_index]]
        most = max(1, chunks * min(usual, count))
        return min(1.0, (engine.plans.running.num_in_flight + 1) / most)

    def _live_bytes(self, error: BaseException) -> tuple[int, int]:
        """Return the bytes that were allocated, and those of the allocation that failed."""
        requested, device = requested_bytes(error), self._engine.device
        played = self._start.facts.emulation.live_bytes
        if played is not None:
            return played() - requested, requested
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device), requested
        return max(0, _resident_bytes() - self._elsewhere), requested

    def _keep(self, found: MemoryCorrection, known: MemoryCorrection) -> list[str]:
        """Store the correction for later plans; return lines that explain it."""
        name = self._start.device_names[self._engine.comms.global_rank]
        file = self._start.facts.correction_file(name)
        try:
            file.add(found)
        except OSError as problem:
            return [f"It can't be stored for the next start: {problem}"]
        learnt = []
        if found.activation_factor > known.activation_factor:
            learnt.append(f"activations, logits and messages count {found.activation_factor:.2f}×")
        if found.usable_bytes is not None:
            learnt.append(f"no more than {found.usable_bytes / _MIB:,.1f} MiB are used")
        return [
            f"From the next start on automatic plans include it: {' and '.join(learnt)} on "
            f"{name} ({file.path}; delete it if something else has filled the device). A given "
            "plan needs fewer layers here, recomputed_layers, or smaller micro-batches."
        ]


def _table(predicted: MemoryTerms, live: _Live, total: int) -> str:
    found = live._asdict()
    rows = [
        (TERM_NAMES[name], value, found.get(name)) for name, value in predicted._asdict().items()
    ]
    rows.append(("all but states", predicted.total - predicted.states, total - live.states))
    rows.append(("in all", predicted.total, total))
    return format_table(
        ("MiB", "predicted peak", "there"),
        [(n, f"{a / _MIB:,.1f}", "" if b is None else f"{b / _MIB:,.1f}") for n, a, b in rows],
    )


def _resident_bytes() -> int:
    """Return the resident bytes of this process; 0 if the system doesn't report them."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
