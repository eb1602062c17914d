"""A step counts as trained only if the device had ended it before communicators were aborted."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.runtime.ranks.communicators import Communicators, StepEnd

CUDA = torch.device("cuda", 0)


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what a stream of CUDA would record; the device hasn't come to it yet."""
    event = mock.Mock(query=mock.Mock(return_value=False))
    stream = mock.Mock(record_event=mock.Mock(return_value=event))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    return event


@pytest.mark.parametrize("is_there", [True, False])
def test_the_first_abort_finds_whether_the_device_was_there(event: Any, *, is_there: bool) -> None:
    host, end, late, broken = StepEnd(), StepEnd(), StepEnd(), StepEnd()
    host.note(torch.device("cpu"))
    host.cut()
    assert host.is_reached, "the host has no streams, and has ended what it has done"
    for item in (end, broken):
        item.note(CUDA)
    event.query.return_value = is_there
    end.cut()
    assert end.is_reached == is_there
    # The abort has ended what the device waited for.
    event.query.return_value = True
    end.cut()
    assert end.is_reached == is_there
    late.cut()
    late.note(CUDA)
    event.query.side_effect = RuntimeError("CUDA error: an illegal memory access")
    broken.cut()
    assert not late.is_reached
    assert not broken.is_reached


def test_nothing_is_aborted_before_the_device_was_looked_at(event: Any) -> None:
    group = mock.Mock(spec=dist.ProcessGroup)
    # What waits for a dead peer goes on, with whatever has come.
    group.abort.side_effect = lambda: event.query.configure_mock(return_value=True)
    comms = Communicators(global_rank=0, world_size=2, exchange=group)
    comms.step_end.note(CUDA)
    comms.abort()
    assert group.abort.called
    assert not comms.step_end.is_reached
