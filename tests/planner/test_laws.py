"""What a search may do more never makes its best plan slower, on random small clusters.

Larger ones take too long for a test: see `tests.benchmarks.bench_search`.
"""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetero.planner import Workload
from tests.benchmarks.search_laws import DEVICES, LAWS, TOLERANCE, Task, slower_by

MOST_DEVICES = 4


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    """Draw a task of up to four devices of two to four types, weak ones among them."""
    nodes: list[tuple[str, int]] = []
    for name in draw(st.lists(st.sampled_from(DEVICES), min_size=2, max_size=4, unique=True)):
        left = MOST_DEVICES - sum(count for _, count in nodes)
        count = draw(st.sampled_from([count for count in (1, 2, 4) if count <= left] or [0]))
        number = draw(st.integers(1, left // count)) if count else 0
        nodes += [(name, count)] * number
    workload = Workload(
        sequence_length=draw(st.sampled_from([2048, 512, 8192])),
        global_batch_size=draw(st.sampled_from([8, 1, 64, 512])),
    )
    return Task(
        nodes=tuple(nodes),
        model=draw(st.sampled_from(["bert-large", "gpt-neo-2.7b", "llama-7b"])),
        workload=workload,
        bytes_per_s=draw(st.sampled_from([1.25e9, 1.25e8, 12.5e9])),
    )


@given(task=tasks(), law=st.sampled_from(sorted({*LAWS} - {"sizes"})))
@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
def test_more_freedom_never_makes_the_best_plan_slower(task, law):
    assert (slower_by(task, law) or 0.0) <= TOLERANCE
