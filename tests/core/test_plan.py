import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.errors import HeteroError, PlanError
from lightning_hetero.core.places import RankPlace
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
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


def stage(ranks: tuple[int, ...], start: int, stop: int, **kept: int) -> StagePlan:
    return StagePlan(ranks=ranks, layers=range(start, stop), **kept)


def pipeline(*stages: StagePlan, num_microbatches: int | None = None) -> PipelinePlan:
    return PipelinePlan(stages=stages, num_microbatches=num_microbatches)


@given(rng=st.randoms(use_true_random=False), data=st.data())
def test_every_plan_survives_json(rng, data):
    plan, world_size = random_plan(rng, max_ranks=24, has_chunks=True)
    counts = data.draw(
        st.lists(
            st.none() | st.integers(1, 9),
            min_size=plan.num_pipelines,
            max_size=plan.num_pipelines,
        )
    )
    plan = ParallelPlan(
        pipelines=tuple(
            PipelinePlan(stages=item.stages, num_microbatches=count)
            for item, count in zip(plan.pipelines, counts, strict=True)
        )
    )
    again = ParallelPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert json.loads(plan.to_json()) == plan.to_dict()
    assert pickle.loads(pickle.dumps(plan)) == plan
    plan.check_world_size(world_size)


@given(rng=st.randoms(use_true_random=False))
def test_place_finds_each_rank_where_the_plan_names_it(rng):
    plan, world_size = random_plan(rng, max_ranks=24, has_chunks=True)
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
        "pipeline  stage  ranks  tp  layers  count  micro-batches",
        "0         0      0      1   0-3     4      -",
        "1         0      1      1   0-0     1      3",
        "1         1      2      1   1-3     3      3",
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


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: stage((), 0, 1), ["no ranks", "Give it at least one rank"]),
        (lambda: stage((3, -1), 0, 1), ["[3, -1]", "start at 0"]),
        (lambda: stage((4,), 2, 2), ["[4]", "[2, 2)", "at least one layer"]),
        (lambda: stage((4,), -1, 2), ["[4]", "[-1, 2)"]),
        (lambda: stage((4,), 0, 3, recomputed_layers=4), ["[4]", "4 of 3 layers", "0 (none)"]),
        (
            lambda: stage((4,), 0, 3, recomputed_layers=2, selective_layers=2),
            ["[4]", "selective_layers 2", "1 of 3 layers", "0 (none) to 1"],
        ),
        (lambda: stage((4,), 0, 3, activation_budget_bytes=0), ["[4]", "must be 1 or more"]),
        (
            lambda: stage((4,), 0, 3, recomputed_layers=1, activation_budget_bytes=10**9),
            ["recomputed_layers 1", "activation_budget_bytes 1000000000", "Give one of them"],
        ),
        (lambda: StagePlan(ranks=(4,), layers=range(0, 4, 2)), ["[4]", "[0, 4)"]),
        (lambda: pipeline(), ["no stages", "at least one stage"]),
        (lambda: pipeline(stage((0,), 0, 1), num_microbatches=-2), ["-2", "0 or more"]),
        (lambda: pipeline(stage((7,), 1, 2)), ["[7]", "layer 1", "skips", "at layer 0"]),
        (
            lambda: pipeline(stage((0,), 0, 2), stage((1,), 3, 4)),
            ["Stage 1", "[1]", "layer 3", "end at 2", "skips", "start at layer 2"],
        ),
        (
            lambda: pipeline(stage((0,), 0, 2), stage((1,), 1, 4)),
            ["Stage 1", "layer 1", "end at 2", "repeats", "start at layer 2"],
        ),
        (
            lambda: ParallelPlan.even(
                world_size=6, num_layers=4, num_stages=2, tp_degree=(1, 2, 3)
            ),
            ["2 stages", "(1, 2, 3)", "one degree for each stage"],
        ),
        (
            lambda: ParallelPlan.even(world_size=6, num_layers=4, num_stages=1, tp_degree=()),
            ["6 processes", "num_stages × tp_degree"],
        ),
        (lambda: ParallelPlan(pipelines=()), ["no pipelines", "at least one"]),
        (
            lambda: ParallelPlan(
                pipelines=(pipeline(stage((0,), 0, 2)), pipeline(stage((1,), 0, 3)))
            ),
            ["[2, 3] layers", "end at layer 3"],
        ),
        (
            lambda: ParallelPlan(pipelines=(pipeline(stage((0,), 0, 2), num_microbatches=0),)),
            ["num_microbatches 0", "at least one must have work"],
        ),
        (
            lambda: ParallelPlan(
                pipelines=(pipeline(stage((5,), 0, 2)), pipeline(stage((5,), 0, 2)))
            ),
            ["Rank 5", "pipeline 0 stage 0", "pipeline 1 stage 0", "once"],
        ),
        (
            lambda: ParallelPlan.from_dict(ASYMMETRIC).check_world_size(2),
            ["rank 2", "2 processes", "ranks 0 to 1", "Start 3 processes"],
        ),
        (
            lambda: ParallelPlan.from_dict(ASYMMETRIC).check_num_layers(6),
            ["4 layers", "has 6", "end at layer 6"],
        ),
        (
            lambda: ParallelPlan.even(world_size=6, num_layers=8, num_stages=4),
            ["6 processes", "4 stages", "divides 6"],
        ),
        (
            lambda: ParallelPlan.even(world_size=4, num_layers=3, num_stages=4),
            ["3 layers", "4 stages", "at most 3"],
        ),
        (
            lambda: ParallelPlan.even(world_size=4, num_layers=3, num_stages=0),
            ["4 processes", "0 stages"],
        ),
    ],
)
def test_a_wrong_plan_is_refused_with_its_values_and_a_remedy(build, said):
    with pytest.raises(PlanError) as caught:
        build()
    assert isinstance(caught.value, HeteroError)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], ["[]", "mapping"]),
        ({"pipes": []}, ["pipes", "pipelines"]),
        ({"pipelines": [], 3: 0}, ["`[3]` is 3", "text"]),
        ({"pipelines": {}}, ["`pipelines` is {}", "list"]),
        ({"pipelines": [{"stage": []}]}, ["pipelines[0]", "stages"]),
        ({"pipelines": [{"stages": 3}]}, ["`pipelines[0].stages` is 3", "list"]),
        (
            {"pipelines": [{"stages": [], "num_microbatches": "few"}]},
            ["`pipelines[0].num_microbatches` is 'few'", "whole number"],
        ),
        (
            {"pipelines": [{"stages": [{"ranks": [0], "layers": [0, 1], "tp": 1}]}]},
            ["pipelines[0].stages[0]", "tp"],
        ),
        (
            {"pipelines": [{"stages": [{"ranks": ["x"], "layers": [0, 1]}]}]},
            ["`pipelines[0].stages[0].ranks[0]` is 'x'", "whole number"],
        ),
        (
            {"pipelines": [{"stages": [{"ranks": [0], "layers": [0, 1, 2]}]}]},
            ["`pipelines[0].stages[0].layers` is [0, 1, 2]", "[first, last + 1]"],
        ),
        (
            {"pipelines": [{"stages": [{"ranks": [0], "layers": [1, 2]}]}]},
            ["In `pipelines[0]`", "starts at layer 1"],
        ),
    ],
)
def test_a_wrong_file_is_refused_by_place_and_value(data, said):
    with pytest.raises(PlanError) as caught:
        ParallelPlan.from_dict(data)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b'{"pipelines": []}'])
def test_a_file_that_is_no_plan_is_named_in_the_error(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.json"):
        ParallelPlan.load(path)


def test_a_missing_file_is_named_in_the_error(tmp_path):
    with pytest.raises(PlanError, match=r"nowhere\.json.*No such file"):
        ParallelPlan.load(tmp_path / "nowhere.json")
