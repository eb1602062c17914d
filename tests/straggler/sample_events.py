"""Events of a run whose link is slow for a while, as its log holds them."""

from lightning_hetero.straggler import (
    ActionEvent,
    ChangeEvent,
    ChangeKind,
    DecisionKind,
    Event,
    Finding,
    FindingKind,
    IterationEvent,
    Mitigation,
)

ITERATIONS = tuple(
    IterationEvent(step=step, iteration_s=2.0 if 40 <= step < 45 else 1.0) for step in range(60)
)
CHANGE = ChangeEvent(
    step=43,
    onset_step=40,
    kind=ChangeKind.SLOWDOWN,
    before=1.0,
    after=2.0,
    where="pipeline 1",
)
FOUND = Finding(step=43, kind=FindingKind.LINK, ranks=(1, 2), ratio=3.0)
ACTION = ActionEvent(
    step=45,
    kind=DecisionKind.APPLY,
    mitigation=Mitigation.SWAP,
    reason="5.00 s lost",
    effect="swapped places of ranks 2 ↔ 3",
    before_s=2.0,
    after_s=1.0,
)
EVENTS: tuple[Event, ...] = (*ITERATIONS, CHANGE, FOUND, ACTION)
