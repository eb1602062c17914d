"""Which run goes on, and from which of its checkpoints: decided on what all ranks saw together.

Nothing here communicates: every rank gets the same answer, or the same error, from one inventory. A
run never begins anew where there is, or might be, something to go on from. Memory doesn't count
there: a node that is gone doesn't bring it back, so a run that has lost its first checkpoint before
any lasting place had it begins anew, as later it would go back to the newest lasting one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lightning_hetero.checkpoint.claims import RUN_FILE
from lightning_hetero.checkpoint.manifest import CheckpointId
from lightning_hetero.checkpoint.recovering.inventory import Inventory, complete_checkpoints
from lightning_hetero.checkpoint.tiers import Holder, TierKind
from lightning_hetero.core.errors import CheckpointError

__all__ = ["Choice", "ChoiceError", "choose", "choose_run"]


_UNSEEN_ATTEMPTS = 1000
"""More starts than a place that can't be read knows of and the others don't."""


class ChoiceError(CheckpointError):
    """There is nothing to go on from, and beginning anew may be wrong; the same on all ranks."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The run and the checkpoints to go on from."""

    run: str | None
    """Identity of the run; None if no place knows one."""
    checkpoints: Mapping[CheckpointId, int]
    """Its complete checkpoints, newest first, with the numbers of their parts."""
    attempt: int
    """Above that of all there is of the run, incomplete or not, and far above where some place
    can't be read: what is saved from now on is newer than what is there, and never its other half.
    """
    ignored: tuple[str, ...]
    """Checkpoints that aren't gone on from: other runs', and remains in memory."""


def choose(
    inventory: Inventory, *, step: int | None = None, skip_unreadable: bool = False
) -> Choice:
    """Decide what to go on from.

    Args:
        inventory: What all ranks saw.
        step: Take this step, of whichever run, and no other.
        skip_unreadable: Go on without places that can't be read.

    Raises:
        ChoiceError: A place that might hold something newer can't be read, there were
            checkpoints and none is complete, or it is unclear which run goes on.
    """
    unreadable = [] if skip_unreadable else inventory.unreadable
    _refuse_unreadable(why for checkpoint, why in unreadable if checkpoint is None)
    run = choose_run(inventory)
    complete = complete_checkpoints(inventory)
    own = {
        item: size
        for item, size in complete.items()
        if (item.run == run if step is None else item.step == step)
    }
    if step is not None and not own:
        steps = [item.step for item in complete]
        raise ChoiceError(
            f"There is no complete checkpoint of step {step}; complete are {steps or 'none'}."
        )
    present = [item for item, _ in inventory.present if item.run == run]
    newest = next(iter(own), None)
    if step is None:
        _refuse_unreadable(
            why
            for item, why in unreadable
            if item is not None and item.run == run and (newest is None or newest < item)
        )
        if newest is None:
            _refuse_to_begin_anew(inventory, run)
    is_blind = any(checkpoint is None for checkpoint, _ in inventory.unreadable)
    next_one = _UNSEEN_ATTEMPTS if is_blind else 1
    return Choice(
        run=run,
        checkpoints=own,
        attempt=next_one + max((item.attempt for item in present), default=-1),
        ignored=tuple(
            sorted(
                {
                    f"{item} of run {item.run} in {at}"
                    for item, at in inventory.present
                    if item.run != run
                }
                | {
                    f"{item} in {at}: parts are gone or were never written, nothing older is there"
                    for item, at in inventory.present
                    if newest is None and item.run == run
                }
            )
        ),
    )


def _refuse_unreadable(reasons: Iterable[str]) -> None:
    text = "; ".join(reasons)
    if text:
        raise ChoiceError(
            f"Can't read {text}; refusing to start from step 0 or from older checkpoints, since "
            "what can't be read may be the newest. Make it readable. To go on from the other "
            "places alone, give LayerwiseCheckpoint skip_unreadable=True."
        )


def choose_run(inventory: Inventory) -> str | None:
    """Return the run that the most lasting place that knows one belongs to."""
    runs: dict[TierKind, set[str]] = {kind: set() for kind in TierKind}
    for kind in TierKind:
        marked = {run for at, run in inventory.places if at.kind is kind and run is not None}
        runs[kind] = marked or {item.run for item, at in inventory.present if at.kind is kind}
    if runs[TierKind.REMOTE]:
        return max(runs[TierKind.REMOTE])
    answered = {at.kind for at, _ in inventory.places}
    on_disk = sorted({(item.run, at) for item, at in inventory.present if at.kind is TierKind.DISK})
    if TierKind.REMOTE in answered and on_disk:
        _refuse_two_opinions(*on_disk[-1])
    if runs[TierKind.DISK]:
        return max(runs[TierKind.DISK])
    # Memory alone isn't asked: the lasting places may have been deleted to start anew.
    return None if answered - {TierKind.MEMORY} else max(runs[TierKind.MEMORY], default=None)


def _refuse_two_opinions(run: str, place: Holder) -> None:
    raise ChoiceError(
        f"{place} holds checkpoints of the run {run!r}, but the place that all nodes share is "
        "empty, so it is unclear what to do. To start anew, delete the checkpoints on all nodes' "
        f"disks, too. To go on from them, copy a disk's {RUN_FILE} to the shared place, or write "
        f'{{"run": "{run}"}} into a file of that name there.'
    )


def _refuse_to_begin_anew(inventory: Inventory, run: str | None) -> None:
    """Raise where a lasting checkpoint was complete once; unfinished first saves are no reason."""
    if inventory.unreadable:
        reasons = "; ".join(why for _, why in inventory.unreadable)
        raise ChoiceError(f"Nothing to go on from is left without what can't be read: {reasons}.")
    has_lasting_place = any(at.kind is not TierKind.MEMORY for at, _ in inventory.places)
    lost = sorted(
        {
            item
            for item, kind in inventory.finished
            if item.run == run and (kind != TierKind.MEMORY or not has_lasting_place)
        }
    )
    if lost:
        steps = ", ".join(str(item) for item in lost)
        broken = "".join(f" {text.rstrip('.')}." for text in inventory.broken)
        raise ChoiceError(
            f"There are checkpoints ({steps}), but none is complete: parts are missing or damaged."
            f"{broken} Bring back the nodes or files that had them, or delete the folders to start "
            "anew."
        )
