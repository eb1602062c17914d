"""Laws of S3: places are swapped, nothing else; congested links leave gradient traffic."""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.straggler.mitigation import gradient_links, propose_swap, swap_ranks


def predictor(slow_ranks, slow_links, *, sync_s=0.3, send_s=0.05, factor=6.0):
    """Return a closed form: slowest stage, pipeline messages, gradient traffic over slow links."""

    def predict_s(plan):
        stage_s = [max(slow_ranks.get(r, 1.0) for r in s.ranks) for _, _, s in plan.iter_stages()]
        per_pipeline = {}
        for (pipeline, _, _), seconds in zip(plan.iter_stages(), stage_s, strict=True):
            total, worst = per_pipeline.get(pipeline, (0.0, 0.0))
            per_pipeline[pipeline] = (total + seconds, max(worst, seconds))
        pipelines_s = max(total + 3 * worst for total, worst in per_pipeline.values())
        congested = gradient_links(plan, slow_links)
        others = len(slow_links) - len(congested)
        sync = sync_s * (factor if congested else 1.0)
        return pipelines_s + sync + others * send_s * factor

    return predict_s


def test_a_congested_link_leaves_gradient_traffic():
    plan = ParallelPlan.even(world_size=8, num_layers=8, num_stages=2)
    link = (0, 4)
    assert gradient_links(plan, [link]) == (link,)
    found, swaps = propose_swap(
        plan, slow_ranks={}, slow_links=[link], predict_s=predictor({}, [link])
    )
    assert gradient_links(found, [link]) == ()
    predict_s = predictor({}, [link])
    assert predict_s(found) < predict_s(plan)
    assert sorted(found.ranks) == list(range(8))
    assert swaps


def test_slow_ranks_come_to_share_a_stage():
    plan = ParallelPlan.even(world_size=12, num_layers=6, num_stages=3, tp_degree=2)
    slow = {0: 2.0, 3: 2.0}
    found, _ = propose_swap(plan, slow_ranks=slow, slow_links=[], predict_s=predictor(slow, []))
    stages = {(place.pipeline_index, place.stage_index) for place in map(found.place, slow)}
    assert len(stages) == 1


def test_only_stages_of_equal_degree_change_places_as_a_whole():
    plan = ParallelPlan.even(world_size=14, num_layers=6, num_stages=3, tp_degree=(1, 4, 2))
    link = (1, 8)
    found, swaps = propose_swap(
        plan, slow_ranks={}, slow_links=[link], predict_s=predictor({}, [link])
    )
    degrees = [pipeline.tp_degrees for pipeline in found.pipelines]
    assert degrees == [(1, 4, 2)] * 2
    assert all(len(a) == len(b) for a, b in swaps)


def test_only_plans_for_which_ranks_have_room_are_proposed():
    plan = ParallelPlan.even(world_size=8, num_layers=8, num_stages=2)
    link, asked = (0, 4), []

    def has_room(plan):
        asked.append(plan)
        return {plan.place(rank).stage_index for rank in (0, 1)} == {0, 1}

    find = partial(
        propose_swap, plan, slow_ranks={}, slow_links=[link], predict_s=predictor({}, [link])
    )
    (best, _), (roomy, _) = find(), find(has_room=has_room)
    assert asked[0] == best, "the best is asked for first"
    assert has_room(roomy)
    assert find(has_room=lambda _: False) is None


def test_nothing_is_proposed_where_nothing_helps():
    plan = ParallelPlan.even(world_size=4, num_layers=4, num_stages=2)
    assert (
        propose_swap(plan, slow_ranks={1: 2.0}, slow_links=[], predict_s=lambda plan: 1.0) is None
    )
    assert propose_swap(plan, slow_ranks={}, slow_links=[], predict_s=lambda plan: 1.0) is None


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.data())
def test_a_proposal_only_permutes_ranks_and_never_does_harm(num_pipelines, num_stages, data):
    size = num_pipelines * num_stages
    plan = ParallelPlan.even(world_size=size, num_layers=6, num_stages=num_stages)
    pairs = list(itertools.combinations(range(size), 2))
    links = data.draw(st.lists(st.sampled_from(pairs), max_size=2, unique=True))
    slow = data.draw(st.dictionaries(st.integers(0, size - 1), st.floats(1.1, 4.0), max_size=3))
    predict_s = predictor(slow, links)
    proposal = propose_swap(plan, slow_ranks=slow, slow_links=links, predict_s=predict_s)
    if proposal is not None:
        found, _ = proposal
        assert found.ranks == plan.ranks
        assert [[s.layers for s in p.stages] for p in found.pipelines] == [
            [s.layers for s in p.stages] for p in plan.pipelines
        ]
        assert predict_s(found) < predict_s(plan)


def test_swapping_twice_is_no_swap():
    plan = ParallelPlan.even(world_size=8, num_layers=4, num_stages=2, tp_degree=2)
    once = swap_ranks(plan, (0, 1), (6, 7))
    assert once != plan
    assert swap_ranks(once, (0, 1), (6, 7)) == plan
    with pytest.raises(ConfigurationError):
        swap_ranks(plan, (0,), (6, 7))
