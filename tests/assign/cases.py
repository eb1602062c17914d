"""Small pipelines and sequences for the tests of assignment."""

from dataclasses import replace

from hypothesis import strategies as st

from lightning_hetero.assign import PipelineCost
from lightning_hetero.assign.pipeline_cost import NEVER_RECOMPUTED


def cost(**changes: float) -> PipelineCost:
    """Return a pipeline like TP 4, PP 2 of a 13B model, with some fields changed."""
    fields = {"a": 8e-10, "b": 5e-5, "c": 0.04, "max_len": 32768, "util_len": 1280, "num_stages": 2}
    return PipelineCost(**(fields | changes))


def costs() -> st.SearchStrategy[PipelineCost]:
    """Draw pipelines that differ in speed, constants, limits and depth."""
    return st.builds(
        PipelineCost,
        a=st.sampled_from([0.0, 1e-8, 1e-6]),
        b=st.floats(1e-5, 1e-3),
        c=st.sampled_from([0.0, 0.01, 0.1, 1.0]),
        max_len=st.integers(50, 3000),
        util_len=st.integers(1, 600),
        num_stages=st.integers(1, 6),
    )


@st.composite
def dispatch_cases(
    draw: st.DrawFn, max_sequences: int = 30, max_pipelines: int = 6
) -> tuple[list[int], list[PipelineCost]]:
    """Draw sequences and pipelines, each sequence fitting somewhere."""
    kinds = draw(st.lists(costs(), min_size=1, max_size=2))
    pipelines = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=max_pipelines))
    longest = max(pipeline.max_len for pipeline in pipelines)
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=max_sequences))
    return lengths, pipelines


@st.composite
def pack_cases(draw: st.DrawFn, max_sequences: int = 30) -> tuple[list[int], PipelineCost]:
    """Draw one pipeline and sequences that fit it."""
    pipeline = replace(
        draw(costs()),
        kept_len=draw(st.sampled_from([NEVER_RECOMPUTED, 40, 700])),
        recompute_share=draw(st.sampled_from([0.0, 0.3])),
    )
    longest = draw(st.sampled_from([pipeline.max_len, max(1, pipeline.max_len // 3)]))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=max_sequences))
    return lengths, pipeline
