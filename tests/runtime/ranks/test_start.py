"""How long processes wait for each other to start, and from then on."""

from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import PeerError
from lightning_hetero.runtime.ranks import meeting
from lightning_hetero.runtime.ranks.meeting import connect_store
from lightning_hetero.strategy import processes
from tests.processes import free_port


@pytest.mark.parametrize("by_agent", [False, True])
def test_a_rank_to_which_nobody_comes_says_how_to_wait_longer(
    monkeypatch: pytest.MonkeyPatch, *, by_agent: bool
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(by_agent))
    # On a busy machine it might come first.
    monkeypatch.setattr(meeting, "end_process", lambda *_: None)
    port, served = free_port(), list[Any]()
    if by_agent:
        served.append(dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    told = r"Rank 0 of 2 waited 0 s .*start_timeout"
    with pytest.raises(PeerError, match=told):
        connect_store(
            "127.0.0.1",
            port,
            global_rank=0,
            world_size=2,
            start_timeout=timedelta(milliseconds=300),
        )


def test_the_limit_of_a_start_isn_t_that_of_later_waits() -> None:
    store, short, long = mock.Mock(), timedelta(seconds=6), timedelta(minutes=3)
    strategy = HeteroStrategy(timeout=short, start_timeout=long)
    strategy._processes._environment = LightningEnvironment()
    with mock.patch.object(processes, "connect_store", return_value=store) as connect:
        strategy._processes._connect_store()
    assert connect.call_args.kwargs["start_timeout"] == long
    store.set_timeout.assert_called_once_with(short)
    # A start is never allowed less than a set-up or a step.
    assert HeteroStrategy(timeout=long, start_timeout=short).processes.start_timeout == long
