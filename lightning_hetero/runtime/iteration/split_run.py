"""Run the check of `results.split_check` on all ranks, with a micro-batch and its two halves.

Each of these *parts* goes forward through the pipeline as in an evaluation. The last stage then
computes the gradients of a few small parameters, of the last layer and after the layers; or that
of the last layer's output, summed over tokens, where none of them trains. The check leaves no trace
in logs, buffers, random states and gradients.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_hetero.core.errors import HeteroError
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.iteration.running_plan import RunningPlan
from lightning_hetero.runtime.iteration.split_parts import copy_of, parts_of
from lightning_hetero.runtime.iteration.step_results import LossScale, loss_of
from lightning_hetero.runtime.random_state import PreservedRandomState, RandomState
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.results.counts import Counting, LossReduction, LossRule
from lightning_hetero.runtime.results.split_check import (
    Evidence,
    Limits,
    Spared,
    Triple,
    is_due,
    judge,
)
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.stage.activations import ActivationLink
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.chunks import Chunk
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass, StageEnd
from lightning_hetero.runtime.stage.recomputation import Recomputation
from lightning_hetero.runtime.unknown import check_known

_MOST_NUMEL, _MOST_PARAMETERS = 2**16, 24
"""Largest number of elements, and of parameters, whose gradients are compared; at least one
parameter is."""
_MOST_ATTEMPTS = 4
"""Largest number of micro-batches that one check tries. A half without targets has no loss, so the
weights of the halves can't be found from it, and another micro-batch is tried."""
Step = Callable[[Any], Any]


@dataclass
class _WatchedPass(MicrobatchPass):
    """A pass that notes dtypes of hidden states, and whether random numbers are drawn."""

    limits: Limits = field(default_factory=lambda: Limits.of(torch.float32))
    has_drawn: bool = False
    _states: RandomState | None = None

    def look(self) -> None:
        """Note whether random numbers were drawn since the last call; called before reseeding."""
        self.has_drawn |= self._states is not None and self._states.has_changed()
        self._states = None

    def begin_layer(self, index: int, *, again: bool = False) -> None:
        """See `MicrobatchPass`."""
        self.look()
        super().begin_layer(index, again=again)
        self._states = RandomState.now()

    def watching(self, step: Step) -> Step:
        """Return a step that notes the generators' states as it begins."""

        def run(microbatch: Any) -> Any:
            self._states = RandomState.now()
            return step(microbatch)

        return run

    def keep_hidden(self, hidden: Tensor) -> None:
        """See `MicrobatchPass`."""
        super().keep_hidden(hidden)
        if hidden.is_floating_point():
            self.limits = _looser(self.limits, Limits.of(hidden.dtype))


@dataclass(frozen=True)
class _Found:
    """What one rank reports of a check."""

    evidence: tuple[Evidence, ...]
    limits: Limits
    is_random: bool
    overflows: bool
    """Whether there is no evidence because an fp16 gradient has overflowed."""


@dataclass(frozen=True)
class _Seen:
    """What a last stage measures when it runs one part."""

    gradient: Tensor = field(default_factory=lambda: torch.zeros(1))
    counts: Mapping[Counting, float] = field(default_factory=dict)
    failure: str = ""
    error: Exception | None = None
    """The error with which the step ended; None without one."""
    overflows: bool = False
    """Whether its fp16 gradient isn't finite, though it has targets."""


class SplitRun:
    """Runs the check when it is due, and keeps its result."""

    def __init__(
        self,
        module: nn.Module,
        layout: ModelLayout,
        boundary: StageBoundary,
        comms: Communicators,
        config: EngineConfig,
        device: torch.device,
    ) -> None:
        self.scale = LossScale()
        """How losses count, according to the last check; the same on every rank."""
        self._module = module
        self._layout = layout
        self._boundary = boundary
        self._comms = comms
        self._config = config
        self._device = device
        self._by_module = getattr(module, "num_target_tokens", None)
        self._evaluates = False
        """Whether the step draws random numbers in train mode; parts then run in eval mode."""
        self._num_iterations = 0
        self._num_checks = 0
        self._is_open = False
        """Whether the last check saw only losses of NaN, as of batches without targets, so that the
        next iteration checks again."""

    def is_due(self) -> bool:
        """Whether to check in the next iteration; called once for each with a cut batch."""
        self._num_iterations += 1
        return is_due(self._num_iterations - 1) or self._is_open

    def run(
        self,
        step: Step,
        microbatches: Sequence[Any],
        running: RunningPlan,
        *,
        seed: tuple[int, ...],
        recompute: Callable[[Chunk], Recomputation],
    ) -> None:
        """Check, and decide how losses count; called by all ranks, in the running plan's contexts.

        `recompute` returns what a stage recomputes in the backward of a part.

        Raises:
            StepError: On every rank, if the batch can't be cut without changing the loss.
        """
        everyone: list[_Found] = []
        first, self._num_checks = self._num_checks, self._num_checks + 1
        for attempt in range(first, first + _MOST_ATTEMPTS):
            parts = parts_of(microbatches, attempt)
            found = self._comms.gather_objects(self._try(step, parts, running, seed, recompute))
            if not self._evaluates and any(item.is_random for item in found):
                self._evaluates = True
                found = self._comms.gather_objects(self._try(step, parts, running, seed, recompute))
            everyone += found
            if not any(i.overflows or any(any(e.empty) for e in i.evidence) for i in found):
                break
        self._decide(everyone, sum(running.num_microbatches))

    def _decide(self, everyone: Sequence[_Found], num_microbatches: int) -> None:
        seen = [evidence for item in everyone for evidence in item.evidence]
        declared = self._config.loss_reduction
        counting = next((first for item in seen for first in item.counts), Counting("samples"))
        before = self.scale.rule or LossRule(declared or LossReduction.MEAN, counting)
        verdict = judge(
            seen,
            before,
            declared,
            limits=reduce(_looser, (item.limits for item in everyone)),
            is_random=any(item.is_random for item in everyone),
            allow_mixing=self._config.allow_mixing,
        )
        saw_none = any(any(i.empty) for i in seen) or any(i.overflows for i in everyone)
        self._is_open = not verdict.is_verified and saw_none
        if verdict.warning:
            rank_zero_warn(verdict.warning)
        if verdict.rule != self.scale.rule and self.scale.rule is not None:
            rank_zero_warn(f"{verdict} Until now it was taken for {before}.")
        elif self.scale.rule is None:
            rank_zero_info("%s", verdict)
        unit = self.scale.unit
        if self.scale.rule is None:  # Only once: hooks should see gradients of one scale.
            targets = [item.counts.get(verdict.rule.counting, (0.0,))[0] for item in seen]
            unit = 2.0 ** round(math.log2(max([1.0, *targets]) * max(num_microbatches, 1)))
        self.scale = LossScale(verdict.rule, verdict.rule.is_sum, unit)

    def _try(
        self,
        step: Step,
        parts: Sequence[Any],
        running: RunningPlan,
        seed: tuple[int, ...],
        recompute: Callable[[Chunk], Recomputation],
    ) -> _Found:
        """Run the parts through this rank's stages: all parts through a stage, then the next."""
        seen, limits, has_drawn = list[_Seen](), self._limits(), False
        pull = running.pull
        with PreservedRandomState(), torch.compiler.set_stance("force_eager"):
            for chunk, part in itertools.product(running.chunks, parts):
                link = chunk.link
                forward = _WatchedPass(
                    layers=chunk.stage.layers,
                    num_layers=running.plan.num_layers,
                    seed=seed,
                    receive=None if link.previous is None else link.receive_activation,
                    wait_unit=pull.wait_unit if pull.is_under_way else None,
                    recomputation=recompute(chunk),
                    limits=limits,
                )
                # Each part starts from the same buffers.
                with Spared(self._module, evaluates=self._evaluates) as spared:
                    given = part if chunk is running.chunks[-1] else copy_of(part)
                    found = self._run_part(step, given, forward, running, link)
                    has_drawn |= forward.has_drawn or spared.has_drawn
                limits = forward.limits
                if found is not None:
                    seen.append(found)
        reports = running.place is not None and running.place.tp_rank == 0
        overflows = any(item.overflows for item in seen)
        evidence = _evidence_of(seen) if seen and reports and not overflows else ()
        return _Found(evidence, limits, has_drawn, overflows)

    def _run_part(
        self,
        step: Step,
        part: Any,
        forward: _WatchedPass,
        running: RunningPlan,
        link: ActivationLink,
    ) -> _Seen | None:
        """Run one part; return its result if this is a last stage."""
        try:
            with running.weights.in_step():
                output = self._boundary.run_step(forward, forward.watching(step), part)
            check_known(output, "What the step returns needs")
            forward.look()
            loss = loss_of(output)
            forward.limits = _looser(forward.limits, Limits.of_graph(loss))
            gradient = self._gradient(loss, forward, running)
            if not loss.isfinite().all():  # Cross entropy's mean over nothing has a gradient of 0.
                gradient.fill_(math.nan)
        except StageEnd as end:
            handed_on = end.handed_on
        except HeteroError:
            raise
        except Exception as error:
            if link.following is not None:
                raise
            return _Seen(failure=f"{type(error).__name__}: {error}", error=error)
        else:
            countings = Counting.likely(part, self._by_module)
            counts = {item: float(item.of(part, self._by_module)) for item in countings}
            overflows = self._config.scales_loss and not gradient.isfinite().all()
            overflows = bool(overflows) and next(iter(counts.values()), 0.0) > 0
            return _Seen(gradient=gradient, counts=counts, overflows=overflows)
        forward.look()
        link.send_activation(handed_on)
        return None

    def _limits(self) -> Limits:
        limits = Limits.of(self._config.compute_dtype)
        kind = self._device.type
        if torch.is_autocast_enabled(kind):
            limits = _looser(limits, Limits.of(torch.get_autocast_dtype(kind)))
        if torch.get_float32_matmul_precision() != "highest":
            limits = _looser(limits, Limits.of(torch.bfloat16))
        return limits

    def _gradient(self, loss: Tensor, forward: _WatchedPass, running: RunningPlan) -> Tensor:
        """Return the loss's gradients with respect to the compared parameters, as one vector."""
        chosen, hidden = self._chosen(running), forward.last_hidden
        if hidden is not None and hidden.requires_grad and not forward.is_reentrant:
            chosen.append(hidden)
        gradients: Sequence[Tensor | None] = [None] * len(chosen)
        try:
            gradients = self._boundary.gradients_of(forward, loss, chosen)
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            # There are checkpoints around the layers, from which `autograd.grad` gets nothing:
            # don't compare.
            forward.has_drawn = True
        vectors = [
            torch.zeros_like(item) if gradient is None else gradient
            for item, gradient in zip(chosen, gradients, strict=True)
        ]
        if chosen and chosen[-1] is hidden:
            output = vectors.pop().float()
            if all(gradient is None for gradient in gradients[:-1]):
                vectors = [output.reshape(-1, output.shape[-1]).sum(0)]
        found = [item.detach().reshape(-1).float() for item in vectors]
        return torch.cat(found).cpu() if found else torch.zeros(1)

    def _chosen(self, running: RunningPlan) -> list[Tensor]:
        """Return small parameters of the last layer and after it, else of the whole stage."""
        shards, specs = running.weights.shards, self._layout.specs
        whole = [
            spec
            for spec in specs
            if spec.name in shards and shards[spec.name].requires_grad and not spec.tp_partial
        ]
        indices = [index for index, spec in enumerate(specs) if spec.layer is not None]
        behind = {spec.name for spec in specs[indices[0] if indices else 0 :] if spec.layer is None}
        last = running.plan.num_layers - 1
        chosen = [item for item in whole if item.layer == last or item.name in behind] or whole
        chosen = sorted(chosen, key=lambda item: item.numel)[:_MOST_PARAMETERS]
        found: list[Tensor] = []
        total = 0
        for spec in chosen:
            total += spec.numel
            if not found or total <= _MOST_NUMEL:
                found.append(shards[spec.name])
        return found


def _evidence_of(seen: Sequence[_Seen]) -> tuple[Evidence, ...]:
    """Return what a last stage's parts tell."""
    is_doubled = len(seen) == 2
    failed = next((item for item in seen if item.failure), None)
    if failed is not None:
        whole = seen[1] if is_doubled else seen[0]
        if whole.error is not None:
            raise whole.error  # The iteration itself would raise it.
        nothing = (0.0, 0.0, 0.0)
        failure = "" if is_doubled else failed.failure
        return (Evidence((nothing, nothing, nothing), {}, failure),)
    whole, first, *others = seen
    second, *twice = others or [first]
    triples = [(whole, first, second), *[(item, first, first) for item in twice]]
    return tuple(Evidence.of([i.gradient for i in found], _counts_of(found)) for found in triples)


def _counts_of(seen: Sequence[_Seen]) -> dict[Counting, Triple]:
    whole, first, second = (item.counts for item in seen)
    return {
        item: (count, first.get(item, 0.0), second.get(item, 0.0)) for item, count in whole.items()
    }


def _looser(one: Limits, other: Limits) -> Limits:
    return max(one, other, key=lambda item: item.refuse)
