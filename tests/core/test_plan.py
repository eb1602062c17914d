import json
import pickle
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.places import RankPlace
from lightning_hetero.core.plan import ParallelPlan
from tests.core.sample_plans import random_plan

ASYMMETRIC = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 4]}]},
        {
            "stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 4]}],
            "num_microbatches": 3,
        },
    ]
}


@given(rng=st.randoms(use_true_random=False), count=st.none() | st.integers(1, 9))
def test_every_plan_survives_json_and_finds_each_rank_where_it_names_it(rng, count):
    plan, world_size = random_plan(rng, max_ranks=24, has_chunks=True)
    first = replace(plan.pipelines[0], num_microbatches=count)
    plan = replace(plan, pipelines=(first, *plan.pipelines[1:]))
    again = ParallelPlan.from_json(plan.to_json())
    assert (again, hash(again)) == (plan, hash(plan))
    assert json.loads(plan.to_json()) == plan.to_dict()
    assert pickle.loads(pickle.dumps(plan)) == plan
    plan.check_world_size(world_size)
    named = set()
    for pipeline_index, stage_index, item in plan.iter_stages():
        for tp_rank, rank in enumerate(item.ranks):
            named.add(rank)
            place = plan.place(rank)
            assert place == RankPlace(
                pipeline_index=pipeline_index,
                stage_index=place.chunks[0],
                tp_rank=tp_rank,
                chunks=place.chunks,
            )
            assert stage_index in place.chunks
    assert plan.ranks == tuple(sorted(named))
    assert all(plan.place(rank) is None for rank in set(range(world_size)) - named)


@given(
    num_pipelines=st.integers(1, 5),
    degrees=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    extra_layers=st.integers(0, 20),
)
def test_even_splits_ranks_once_and_layers_to_within_one(num_pipelines, degrees, extra_layers):
    num_stages, world_size = len(degrees), num_pipelines * sum(degrees)
    num_layers = num_stages + extra_layers
    plan = ParallelPlan.even(
        world_size=world_size,
        num_layers=num_layers,
        num_stages=num_stages,
        tp_degree=degrees[0] if len(set(degrees)) == 1 else degrees,
    )
    assert plan.num_pipelines == num_pipelines
    assert plan.max_stages == num_stages
    assert plan.ranks == tuple(range(world_size))
    assert plan.num_layers == num_layers
    counts = [len(item.layers) for _, _, item in plan.iter_stages()]
    assert max(counts) - min(counts) <= 1
    assert {item.tp_degrees for item in plan.pipelines} == {tuple(degrees)}
    assert plan.has_tensor_parallelism == (max(degrees) > 1)


def test_the_ranks_of_a_pipeline_share_its_layers():
    first = [{"ranks": [0, 1], "layers": [0, 1]}, {"ranks": [4, 5], "layers": [1, 4]}]
    second = [{"ranks": [2], "layers": [0, 4]}]
    plan = ParallelPlan.from_dict({"pipelines": [{"stages": first}, {"stages": second}]})
    shares = [plan.share(rank) for rank in range(6)]
    assert shares == [1 / 8, 1 / 8, 1.0, 0.0, 3 / 8, 3 / 8]


def test_the_example_of_the_manual_loads_and_prints_as_a_table(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(ASYMMETRIC))
    plan = ParallelPlan.load(path)
    assert str(plan).splitlines() == [
        "pipeline  stage  ranks  TP  layers   micro-batches",
        "0         0      0      1   0-3 (4)  -",
        "1         0      1      1   0-0 (1)  3",
        "1         1      2      1   1-3 (3)  3",
    ]
    plan.save(tmp_path / "again.json")
    assert ParallelPlan.load(tmp_path / "again.json") == plan


def test_stages_say_what_they_recompute_in_json_and_in_the_table():
    stages = [
        {"ranks": [0], "layers": [0, 4], "recomputed_layers": 3, "selective_layers": 1},
        {"ranks": [1], "layers": [4, 5], "activation_budget_bytes": "2 GiB"},
        {"ranks": [2], "layers": [5, 6]},
    ]
    plan = ParallelPlan.from_dict({"pipelines": [{"stages": stages}]})
    assert [s.recomputed_layers for _, _, s in plan.iter_stages()] == [3, None, None]
    assert [s.activation_budget_bytes for _, _, s in plan.iter_stages()] == [None, 2**31, None]
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert [line.split("  ")[-1].strip() for line in str(plan).splitlines()] == [
        "recomputed",
        "3 layers, 1 selectively",
        "within 2 GiB",
        "-",
    ]
