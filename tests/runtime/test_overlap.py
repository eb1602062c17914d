"""Pull and push travel while the rank computes, as a trace of `torch.profiler` shows."""

from itertools import pairwise

import pytest

from tests.processes import ProcessPool
from tests.runtime.runs import pipeline, plan_of, stage
from tests.runtime.traced import Span, trace
from tests.toy import ToyOptions

pytestmark = pytest.mark.dist

# Two pipelines, so that every layer travels both ways; one has two stages.
PLAN = plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(1, 0, 2), stage(2, 2, 3)))
LAYERS = ((0, 1, 2), (0, 1), (2,))
"""Of each rank."""


@pytest.fixture(scope="module")
def traces(pool: ProcessPool) -> list[list[Span]]:
    return pool.run(trace, len(LAYERS), PLAN, ToyOptions(num_layers=3, width=32), 4)


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
