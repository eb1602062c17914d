"""S4: a run that ElasticRestart can restart is left by the machine of the slow rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.callbacks import ElasticRestart, elastic
from lightning_hetero.callbacks.watching.watched_run import PlainRun
from lightning_hetero.straggler import DecisionKind, Finding, FindingKind, Mitigation
from lightning_hetero.straggler.mitigation import Decision

SLOW = [Finding(kind=FindingKind.DEVICE, ranks=(3,), ratio=5.0)]
NODES = (0, 0, 1, 1, 2, 2)


def restarter(rank: int) -> ElasticRestart:
    callback = ElasticRestart()
    callback._checkpoint = SimpleNamespace(node_of_rank=NODES)  # type: ignore[assignment]
    callback._global_rank = rank
    return callback


def run_with(callbacks: list[Any]) -> PlainRun:
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    trainer: Any = SimpleNamespace(strategy=strategy, world_size=len(NODES))
    return PlainRun(trainer, callbacks)


def mitigations(run: PlainRun):
    return run.find_mitigations(SLOW, None, healthy_s=3.0)


def test_the_machine_of_a_slow_rank_leaves_and_the_others_share_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic, "is_torchelastic_launched", lambda: True)
    callbacks = [restarter(rank) for rank in range(len(NODES))]
    for callback in callbacks:
        run = run_with([callback])
        (found,) = mitigations(run)
        assert found.mitigation is Mitigation.RESTART
        # The slow rank's neighbour on the same machine goes with it.
        assert found.iteration_s == pytest.approx(3.0 * 6 / 4)
        assert run.act(Decision(kind=DecisionKind.APPLY, choice=found, reason="")) is None
    assert [callback.is_leaving for callback in callbacks] == [False] * 2 + [True] * 2 + [False] * 2


def test_without_somebody_who_starts_processes_again_there_is_no_restart() -> None:
    assert mitigations(run_with([restarter(0)])) == ()
    assert mitigations(run_with([])) == ()


def test_a_run_on_one_machine_is_never_restarted_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(elastic, "is_torchelastic_launched", lambda: True)
    callback = restarter(0)
    callback._checkpoint = SimpleNamespace(node_of_rank=(0,) * 6)  # type: ignore[assignment]
    assert mitigations(run_with([callback])) == ()
