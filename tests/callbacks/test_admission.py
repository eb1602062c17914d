"""Devices are tested before they work, and left out only if something is to be done at all."""

from typing import Any
from unittest import mock

import pytest
import torch

from lightning_hetero.callbacks.watching import session
from lightning_hetero.callbacks.watching.session import StragglerSession
from lightning_hetero.straggler import DecisionKind, Finding, Mitigation
from lightning_hetero.straggler.events import FindingKind
from lightning_hetero.straggler.mitigation import PossibleMitigation
from lightning_hetero.straggler.watch import WatchConfig

SLOW = Finding(kind=FindingKind.DEVICE, ranks=(1,), ratio=2.0)
LEAVE = PossibleMitigation(mitigation=Mitigation.RESTART, iteration_s=1.0, exclude=(1,))


class TwoAlike:
    """Rank 0 of two ranks that say the same."""

    world_size, global_rank = 2, 0

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, value]

    def on_rank_0(self, work: Any) -> Any:
        return work()


class Leaving:
    """A run that leaves slow devices out."""

    device, clock, message_bytes = torch.device("cpu"), mock.Mock(), 1024

    def __init__(self) -> None:
        self.acts: list[Any] = []

    def find_mitigations(self, *_: Any, **__: Any) -> tuple[PossibleMitigation, ...]:
        return (LEAVE,)

    def act(self, decision: Any) -> None:
        self.acts.append((decision.kind, decision.choice))


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_slow_device_is_named_and_left_out_except_in_a_dry_run(
    monkeypatch: pytest.MonkeyPatch,
    dry_run: bool,  # noqa: FBT001
) -> None:
    monkeypatch.setattr(session, "probe_device", lambda *_, **__: 1.0)
    monkeypatch.setattr(session, "probe_memory", lambda *_, **__: 1.0)
    monkeypatch.setattr(session, "probe_links", lambda *_, **__: {})
    monkeypatch.setattr(session, "slow_of_their_kind", lambda *_, **__: (SLOW,))
    run, seen, said = Leaving(), [], []
    StragglerSession(
        run,  # type: ignore[arg-type]
        TwoAlike(),  # type: ignore[arg-type]
        WatchConfig(dry_run=dry_run),
        report=seen.append,
        say=said.append,
        admission=1.3,
    )
    assert seen == [SLOW]
    assert said == [f"Before training: {SLOW}"]
    assert run.acts == ([] if dry_run else [(DecisionKind.APPLY, LEAVE)])
