"""A process that plans ahead says what planning here says, also after it was killed."""

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from typing import Any

import pytest

from lightning_hetero.assign import iteration
from lightning_hetero.assign.iteration import plan_text, read_assignment
from lightning_hetero.core import process as core_process
from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.process import AnsweringProcess
from lightning_hetero.data import ahead
from lightning_hetero.data.ahead import AheadPlanner, AssignmentStore
from lightning_hetero.data.loader import TicketDealer
from lightning_hetero.data.order import Cursor, EpochOrder
from tests.data.rows import dealers, equal_candidates, lengths_of, request


def test_a_planning_process_says_what_planning_here_says() -> None:
    process = AnsweringProcess(iteration.__name__)
    wanted = [request(*lengths_of(40, seed=seed)) for seed in range(3)]
    assert [process.ask(item) for item in wanted] == [plan_text(item) for item in wanted]
    with pytest.raises(AssignmentError, match="longest sample has 999 tokens"):
        read_assignment(process.ask(request(999)), request(999))
    process.kill()
    with pytest.raises((OSError, EOFError)):
        process.ask(wanted[0])
    process.restart()
    assert process.ask(wanted[0]) == plan_text(wanted[0])
    process.stop()


def test_a_planning_process_imports_neither_torch_nor_lightning() -> None:
    root = os.getcwd()
    program = core_process._PROGRAM.format(root=root, module=iteration.__name__)
    program = program.replace("serve()", "print(sorted(sys.modules))")
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "'lightning_hetero.assign.iteration'" in found.stdout
    assert "'torch'" not in found.stdout
    assert "'lightning'" not in found.stdout


def test_a_killed_process_costs_no_sample_and_a_new_one_takes_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    order = EpochOrder(lengths_of(200), tokens_per_step=100, seed=1)
    candidates = equal_candidates(2)
    expected = list(dealers(order, candidates, 1)[0].deal(Cursor()))
    planner = AheadPlanner(AssignmentStore(), num_ahead=6)
    planner._patience_s = 200.0
    process = planner._process
    assert process is not None
    tickets = TicketDealer(order, planner, candidates).deal(Cursor())
    first_pid = process.pid
    found = list(islice(tickets, 4))
    os.kill(first_pid, signal.SIGKILL)
    found += tickets
    assert "planning process has died" in caplog.text
    assert process.pid != first_pid
    planner.close()
    assert found == expected


def test_closing_ends_what_is_being_planned_at_once_and_leaves_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned_here: list[Any] = []
    monkeypatch.setattr(ahead, "plan_text", lambda item: planned_here.append(item) or "")
    planner = AheadPlanner(AssignmentStore(), num_ahead=1)
    assert planner._process is not None
    only_pid = planner._process.pid
    os.kill(only_pid, signal.SIGSTOP)  # It never answers.
    planner.request("key", request(*lengths_of(40)))
    while planner._thread._work_queue.qsize():
        time.sleep(0.01)
    planner.close()
    assert not planned_here
    with pytest.raises(ProcessLookupError):
        os.kill(only_pid, 0)
