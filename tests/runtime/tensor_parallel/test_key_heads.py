"""Key and value heads are shared out to any degree that divides the query heads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.runtime.tensor_parallel.heads import Heads
from tests.processes import ProcessPool
from tests.runtime.huggingface_runs import HuggingFaceCase, HuggingFaceOutcome, train
from tests.runtime.runs import pipeline, plan_of, stage

pytest.importorskip("transformers")

from tests.runtime.test_tensor_parallel_hf import assert_same

NUM_STEPS = 2
SIZES = {1: (8, 16), 2: (8, 16), 3: (24, 48)}
"""By number of key heads: query heads and hidden size."""


def check(pool: ProcessPool, model: str, num_heads: int, plan: Any, **more: Any) -> None:
    query, hidden = SIZES[num_heads]
    changes = {
        "num_attention_heads": query,
        "num_key_value_heads": num_heads,
        "hidden_size": hidden,
        "num_hidden_layers": 2,
        "head_dim": 2 if model != "phi3" else hidden // query,
        **({"layer_types": ["sliding_attention", "full_attention"]} if "gemma" in model else {}),
    }
    ranks = [r for p in plan["pipelines"] for s in p["stages"] for r in s["ranks"]]
    batch = 4 // len(plan["pipelines"])
    case = HuggingFaceCase(
        model=model,
        plan=plan,
        world_size=len(ranks),
        config=tuple(changes.items()),
        batch_size=batch,
        num_rows=4 * NUM_STEPS,
        **more,
    )
    expected = pool.run_alone(train, case.on_single_device())
    assert len(set(expected.losses)) == len(expected.losses) == NUM_STEPS
    for outcome in pool.run(train, case.world_size, case):
        assert_same(with_scales(outcome, model), with_scales(expected, model), 1e-5)


def with_scales(outcome: HuggingFaceOutcome, model: str) -> HuggingFaceOutcome:
    """Return an outcome with the factors of norms: Gemma keeps what they exceed one by."""
    offset = np.float32("gemma" in model)
    after = {k: v + offset if "norm" in k else v for k, v in outcome.after.items()}
    return replace(outcome, after=after)


@pytest.mark.dist
@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize(
    ("model", "degree"),
    [("llama", 2), ("llama", 4), ("llama", 8), ("qwen3", 4), ("gemma3_text", 2), ("phi3", 4)],
)
def test_a_group_of_any_degree_trains_as_one_device_does(
    pool: ProcessPool, model: str, degree: int, num_heads: int
) -> None:
    check(pool, model, num_heads, plan_of(pipeline(stage(list(range(degree)), 0, 2))))


@pytest.mark.dist
@pytest.mark.parametrize(
    "option",
    [
        *(("ownership", "holders"), ("ownership", "even"), ("ownership", "parameter")),
        *(("redundancy", 1), ("exchange", "reduce-scatter")),
    ],
)
@pytest.mark.parametrize("num_heads", [1, 3])
def test_pipelines_of_unequal_degrees_sum_the_copies_of_heads(
    pool: ProcessPool, num_heads: int, option: tuple[str, Any]
) -> None:
    plan = plan_of(pipeline(stage([2, 0, 4, 3], 0, 2)), pipeline(stage(1, 0, 1), stage(5, 1, 2)))
    check(pool, "llama", num_heads, plan, options=(option,))


@pytest.mark.dist
@pytest.mark.parametrize("exchange", ["collectives", "reduce-scatter"])
def test_equal_pipelines_sum_the_copies_of_heads_by_collectives(
    pool: ProcessPool, exchange: str
) -> None:
    plan = plan_of(pipeline(stage([2, 0], 0, 2)), pipeline(stage([1, 3], 0, 2)))
    check(pool, "qwen3", 1, plan, options=(("exchange", exchange),))


@pytest.mark.dist
def test_sequence_parallelism_with_shared_heads(pool: ProcessPool) -> None:
    plan = plan_of(pipeline(stage([2, 0, 1, 3], 0, 2)))
    check(pool, "qwen3", 3, plan, options=(("sequence_parallel", True),))


@given(
    count=st.integers(1, 6), readers=st.integers(1, 12), degree=st.integers(1, 12), data=st.data()
)
def test_ranks_hold_the_heads_that_their_queries_read(
    count: int, readers: int, degree: int, data: st.DataObject
) -> None:
    readers *= degree  # So that the degree divides the query heads.
    rows = data.draw(st.integers(1, 3))
    spec = ParameterSpec(
        name="key", shape=(count * rows, 2), tp_dim=0, tp_heads=count, tp_readers=readers
    )
    heads = Heads(count=count, readers=readers, blocks=1, attention="")
    share = count * readers // degree
    for tp_rank in range(degree):
        ((start, stop),) = spec.rows_of(tp_rank, degree)
        index, run = heads.read(tp_rank, degree)
        read = [start // rows + local for local in index for _ in range(run)]
        assert read == [q // readers for q in range(tp_rank * share, (tp_rank + 1) * share)]
        assert (start, stop) == (min(read) * rows, (max(read) + 1) * rows)


def test_one_spec_says_what_is_held_however_often() -> None:
    spec = ParameterSpec(name="key", shape=(6, 2), tp_dim=0, tp_heads=3, tp_readers=8)
    assert [spec.rows_of(rank, 2) for rank in range(2)] == [((0, 4),), ((2, 6),)]
    whole = replace(spec, tp_heads=0, tp_readers=1)
    assert [whole.rows_of(rank, 2) for rank in range(2)] == [((0, 3),), ((3, 6),)]
