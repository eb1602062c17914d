"""S4: a run that ElasticRestart can restart is left by the machine of the slow rank."""

from types import SimpleNamespace

import pytest
import torch

from lightning_hetero.callbacks import ElasticRestart, elastic
from lightning_hetero.callbacks.watching.watched_run import WatchedRun
from lightning_hetero.straggler import DecisionKind, Finding, FindingKind, Mitigation
from lightning_hetero.straggler.mitigation import Decision

SLOW = [Finding(kind=FindingKind.DEVICE, ranks=(3,), ratio=5.0)]
LINKS = [Finding(kind=FindingKind.LINK, ranks=ranks, ratio=5.0) for ranks in ((0, 3), (3, 5))]
NODES = (0, 0, 1, 1, 2, 2)


def run_of(rank: int, nodes: tuple[int, ...] = NODES) -> tuple[ElasticRestart, WatchedRun]:
    callback = ElasticRestart()
    callback._run = SimpleNamespace(
        checkpoints=[SimpleNamespace(node_of_rank=nodes)], restarters=[callback]
    )
    callback._global_rank = rank
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"), run=callback._run, plan=None, datamodule=None
    )
    trainer = SimpleNamespace(world_size=len(NODES))
    return callback, WatchedRun(trainer, strategy)


@pytest.mark.parametrize("findings", [SLOW, LINKS], ids=["device", "two links of one rank"])
def test_the_machine_of_a_slow_rank_leaves_and_the_others_share_its_work(monkeypatch, findings):
    monkeypatch.setattr(elastic, "is_torchelastic_launched", lambda: True)
    are_leaving = []
    for rank in range(len(NODES)):
        callback, run = run_of(rank)
        (found,) = run.find_mitigations(findings, None, healthy_s=3.0)
        assert found.mitigation is Mitigation.RESTART
        # The slow rank's neighbour on the same machine goes with it.
        assert found.iteration_s == pytest.approx(3.0 * 6 / 4)
        assert run.act(Decision(kind=DecisionKind.APPLY, choice=found, reason="")) is None
        are_leaving.append(callback.is_leaving)
    assert are_leaving == [False] * 2 + [True] * 2 + [False] * 2


@pytest.mark.parametrize(("is_launched", "nodes"), [(False, NODES), (True, (0,) * 6)])
def test_without_a_launcher_or_another_machine_there_is_no_restart(monkeypatch, is_launched, nodes):
    monkeypatch.setattr(elastic, "is_torchelastic_launched", lambda: is_launched)
    _, run = run_of(0, nodes)
    assert run.find_mitigations(SLOW, None, healthy_s=3.0) == ()
