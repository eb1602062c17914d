"""Pull and push travel while the rank computes, as a trace of `torch.profiler` shows."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning as L
import pytest
from torch.profiler import ProfilerActivity, profile

from tests.fits import Case, train
from tests.plans import CUT_LATE
from tests.processes import ProcessPool

pytestmark = pytest.mark.dist

TRACED_STEP = 2
"""The first iterations learn which weights travel where."""


@dataclass(frozen=True)
class Span:
    """One range of a trace; times in microseconds."""

    name: str
    start: float
    stop: float


class TraceStep(L.Callback):
    """Traces the iteration that follows `TRACED_STEP` others."""

    def __init__(self) -> None:
        self.profiler = profile(activities=[ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == TRACED_STEP:
            self.profiler.start()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == TRACED_STEP + 1:
            self.profiler.stop()


def trace(rank: int, case: Case) -> list[Span]:
    """Return the ranges of one iteration on this rank."""
    callback = TraceStep()
    train(case, callback)
    return [
        Span(event.name, event.time_range.start, event.time_range.end)
        for event in callback.profiler.events() or ()
    ]


# Two pipelines, so that every layer travels both ways; one has two stages.
LAYERS = ((0, 1, 2), (0, 1), (2,))
"""Of each rank."""


@pytest.fixture(scope="module")
def traces(pool: ProcessPool) -> list[list[Span]]:
    rows = 2 * 4 * (TRACED_STEP + 1)
    case = Case(plan=CUT_LATE, width=32, batch_size=4, num_rows=rows, num_microbatches=2)
    return pool.run(trace, len(LAYERS), case)


def only(spans: list[Span], name: str) -> Span:
    (found,) = (span for span in spans if span.name == name)
    return found


def between(spans: list[Span], first: Span, second: Span, names: tuple[str, ...]) -> bool:
    """Return whether a range of one of these names lies between two others."""
    return any(s.name in names and first.stop < s.start < s.stop < second.start for s in spans)


def test_a_layer_is_pushed_while_the_layers_before_it_compute(traces: list[list[Span]]) -> None:
    for spans, layers in zip(traces, LAYERS, strict=True):
        backward, wait = only(spans, "B1"), only(spans, "push.wait")
        posts = [only(spans, f"push.post {layer}") for layer in reversed(layers)]
        for post in posts:
            assert backward.start < post.start < post.stop < backward.stop < wait.start
        for post, following in pairwise(posts):
            assert between(spans, post, following, ("AddmmBackward0", "MmBackward0"))


def test_a_layer_waits_only_for_its_own_weights(traces: list[list[Span]]) -> None:
    for spans, layers in zip(traces, LAYERS, strict=True):
        forward = only(spans, "F0")
        waits = [only(spans, f"pull.wait {layer}") for layer in layers]
        for layer, wait in zip(layers, waits, strict=True):
            assert only(spans, f"pull.post {layer}").stop < forward.start
            assert forward.start < wait.start < wait.stop < forward.stop
        for wait, following in pairwise(waits):
            assert between(spans, wait, following, ("aten::addmm",))
