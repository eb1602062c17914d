"""Put the first steps after a recovery on probation; a copy that fails is set aside.

`checkpoint.probation` judges. This class gathers losses and gradient norms of steps, the same on
all ranks, keeps them for the checkpoints, and carries out the verdict.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from lightning_hetero.callbacks.run import run_of
from lightning_hetero.checkpoint import Recovered, Tier, Transport
from lightning_hetero.checkpoint.probation import (
    MAX_TRIES,
    FailedTry,
    Probation,
    StepFacts,
    acquit,
    failed_alike,
    put_in_quarantine,
    read_failed_tries,
)
from lightning_hetero.checkpoint.transport import finish_together
from lightning_hetero.core.errors import CheckpointError
from lightning_hetero.models.batches import tensors_of
from lightning_hetero.runtime.exchange.shares import GradientLine
from lightning_hetero.runtime.results.iteration_loss import NonfiniteGradients

__all__ = ["Trial"]

_log = logging.getLogger(__name__)

_NUM_REMEMBERED = 256
_NUM_VALUES = 8


@dataclass
class _Tried:
    """The checkpoint that this start of a run has recovered."""

    recovered: Recovered
    tiers: Sequence[Tier]
    """The tiers in which this rank records a failure."""
    probation: Probation
    failed: list[FailedTry] = field(default_factory=list)


class Trial:
    """Losses and gradient norms of steps, and the probation; every rank makes the same calls."""

    def __init__(self) -> None:
        self._tried: _Tried | None = None
        self._facts: deque[StepFacts] = deque(maxlen=_NUM_REMEMBERED)
        self._pending: list[tuple[int, Tensor | None, Tensor | None]] = []
        """(step, loss, squared norm of this rank's gradients), still on the device."""
        self._square: Tensor | None = None
        self._batch: Any = None

    def begin(
        self,
        recovered: Recovered,
        tiers: Sequence[Tier],
        transport: Transport,
        *,
        is_first_of_node: bool,
    ) -> None:
        """Put a recovered state on probation. Communicates."""
        rank = transport.global_rank
        looked = [
            tier
            for tier in tiers
            if tier.is_looked_after_by(rank, is_first_of_node=is_first_of_node)
        ]
        _, answers = finish_together(
            lambda _: read_failed_tries(looked, recovered.id.run),
            transport,
            lambda found: {"failed": [item.encode().decode() for item in found]},
            may_fail=True,
        )
        texts = {text for answer in answers for text in answer.get("failed", ())}
        failed = [FailedTry.decode(text.encode()) for text in sorted(texts)]
        known = [
            StepFacts(*item) for item in recovered.metadata["lightning_hetero"].get("steps", [])
        ]
        self._facts.extend(known)
        probation = Probation(recovered.id.step, known, failed)
        self._tried = _Tried(recovered, looked, probation, failed)

    def history(self, trainer: pl.Trainer) -> list[list[Any]]:
        """Return [step, loss, gradient norm] of the last steps, for a checkpoint. Communicates."""
        self._settle(trainer)
        return [[f.step, f.loss, f.gradient_norm] for f in self._facts]

    # -- steps ------------------------------------------------------------------------------------

    def see_batch(self, trainer: pl.Trainer, batch: Any) -> None:
        """Remember the batch of a step on probation."""
        self._batch = batch if self._covers(trainer.global_step + 1) else None

    def see_gradients(self, optimizer: Optimizer) -> None:
        """Add up the squares of this rank's gradients, before they are clipped."""
        with torch._C.DisableTorchFunctionSubclass():  # This rank's own, not as hooks get them.
            gradients = [
                gradient
                for group in optimizer.param_groups
                for parameter in group["params"]
                if (gradient := parameter.grad) is not None and not gradient.is_sparse
            ]
            if gradients:
                square = _square_of(gradients)
                self._square = square if self._square is None else self._square + square

    def see_step(self, trainer: pl.Trainer, outputs: Tensor | Mapping[str, Any] | None) -> None:
        """Record a step that has ended, and judge it if it is on probation. Communicates then.

        Raises:
            CheckpointError: The recovered state can't be trusted, or the step's data is at fault;
                on all ranks.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        known_loss = loss.detach() if isinstance(loss, Tensor) and loss.numel() == 1 else None
        step = trainer.global_step
        self._pending.append((step, known_loss, self._square))
        self._square = None
        if len(self._pending) >= _NUM_REMEMBERED:
            self._settle(trainer)
        if self._covers(step) and not _left_out(trainer):
            self._settle(trainer)
            try:
                self._judge(trainer, self._facts[-1])
            except CheckpointError:
                # A restart begins when the first rank ends, and must find what all have set aside.
                trainer.strategy.barrier("what failed is put aside")
                raise

    def see_exception(self, trainer: pl.Trainer, exception: BaseException) -> None:
        """Judge the recovered state if the strategy has refused non-finite gradients."""
        strategy, step = run_of(trainer).strategy, trainer.global_step + 1
        if isinstance(exception, CheckpointError) or not self._covers(step):
            return
        if strategy is not None and not strategy.engine.gradients_are_finite:
            try:
                self._judge(trainer, StepFacts(step, None, float("nan")))
            except CheckpointError as verdict:
                exception.add_note(str(verdict))

    def _covers(self, step: int) -> bool:
        return self._tried is not None and self._tried.probation.covers(step)

    def _settle(self, trainer: pl.Trainer) -> None:
        """Turn pending steps into numbers; gradient norms are over all ranks. Communicates."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        device = trainer.strategy.root_device
        zero = torch.zeros((), device=device)
        squares = torch.stack([zero if s is None else s.to(device) for _, _, s in pending])
        norms = trainer.strategy.reduce(squares, reduce_op="sum").sqrt().tolist()
        for (step, loss, _), norm in zip(pending, norms, strict=True):
            self._facts.append(StepFacts(step, None if loss is None else float(loss), norm))

    # -- the verdict ------------------------------------------------------------------------------

    def _judge(self, trainer: pl.Trainer, facts: StepFacts) -> None:
        tried = self._tried
        assert tried is not None
        reason = tried.probation.doubt(facts)
        if not reason:
            return
        recovered = tried.recovered
        new = FailedTry(
            recovered.id, recovered.report.place, facts, reason, _describe(trainer, self._batch)
        )
        alike = failed_alike(tried.failed, new)
        is_last = recovered.report.is_last
        if is_last and facts.is_finite:
            _log.warning("%s. There is no other copy to go on from, so training goes on.", new)
            return
        if not is_last:
            put_in_quarantine(tried.tiers, new)
        if len(alike) >= MAX_TRIES:
            acquit(tried.tiers, facts.step)
            raise CheckpointError(
                f"Step {facts.step} has failed from {len(alike)} copies: "
                f"{'; '.join(map(str, alike))}. So its data is at fault, not the checkpoints, "
                f"which count again: {new.samples}. Mend or leave out these samples, then start "
                "again."
            )
        then = "This copy is put aside; start again (torchrun does) to go on from the next one."
        if is_last:
            then = "There is no other copy to go on from. Look at what the step was trained on."
        raise CheckpointError(
            f"What was recovered can't be trusted: {new}. {then} Tried so far at this step: "
            f"{len(alike)} of {MAX_TRIES}. It was trained on {new.samples}."
        )


def _square_of(gradients: list[Tensor]) -> Tensor:
    """Return the sum of the squares of all elements."""
    if GradientLine.fits(gradients) and gradients[0].is_floating_point():
        # Of 49 tensors with 4,000 elements `_foreach_norm` takes 230 µs on a CPU, this 90.
        line: Tensor = _flatten_dense_tensors(gradients)  # type: ignore[no-untyped-call]
        return line.detach().float().square().sum()
    return torch.stack(torch._foreach_norm(gradients)).detach().float().square().sum()


def _left_out(trainer: pl.Trainer) -> bool:
    """Whether the last step may have been skipped for non-finite gradients, as the user wants."""
    strategy = run_of(trainer).strategy
    if strategy is not None:
        answer = strategy.engine.config.nonfinite_gradients
        return answer is NonfiniteGradients.SKIP and not strategy.engine.gradients_are_finite
    # A gradient scaler finds its scale by overflowing.
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def _describe(trainer: pl.Trainer, batch: Any) -> str:
    """Return a description by which a batch can be found."""
    place = f"batch {trainer.fit_loop.batch_idx} of epoch {trainer.current_epoch}"
    leaves = [tensor for tensor in tensors_of(batch) if tensor.numel()]
    if not leaves:
        return place
    first = leaves[0]
    values = ", ".join(f"{value:g}" for value in first.detach().reshape(-1)[:_NUM_VALUES].tolist())
    return (
        f"{place} (rank {trainer.global_rank} has a tensor {tuple(first.shape)} that begins with "
        f"{values})"
    )
