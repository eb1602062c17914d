"""What is improved besides the best plans of the whole search."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import PlanningOptions, Workload
from lightning_hetero.planner.arrangement import PipelineNodes, used_counts
from lightning_hetero.planner.improving.improver import Improver
from lightning_hetero.planner.improving.local_search import improve_best, improve_long
from lightning_hetero.planner.judge import Candidate
from lightning_hetero.planner.parts import of_some_types, without_a_node
from lightning_hetero.planner.search import PlanSearch
from lightning_hetero.simulator import RooflineCost, StateLayout

WORK = Workload(sequence_length=512, global_batch_size=64)


def new_search(*nodes: tuple[str, int, int]) -> PlanSearch:
    """Return a search for a number of nodes, of a device and a count each."""
    cluster = Cluster(
        nodes=tuple(Node(device=name, count=n) for name, n, number in nodes for _ in range(number)),
        inter_node_bytes_per_s=50e9,
    )
    fp16 = StateLayout.of_precision("16-mixed")  # Which V100 and T4 compute faster than bf16.
    cost = RooflineCost(cluster, ModelSpec.load("bert-large"), layout=fp16)
    return PlanSearch(cost, WORK, PlanningOptions())


def test_parts_near_the_best_plan_are_improved_and_may_get_the_devices_that_they_lack():
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    whole, alone = (4, 2, 2), (4, 0, 0)
    asked = []

    def find_starts(estimators, part, below):
        asked.append((part, below))
        return search.starts.find_with_less(estimators, part, float("inf")) if part == alone else []

    improver = Improver(search.judge, search.estimators, (), find_starts)
    few = search.starts.find_with_less(search.estimators, (0, 2, 2), float("inf"))
    best_s = search.judge.score(few[0])
    ranked = improver.improve_parts(few, [(4, 2, 0), alone], lambda part: None)
    # Of 116 devices, a part began 5.1 % above the best plan and ended 6 % below it. What is found
    # may be 5 % above what is looked for.
    below = pytest.approx(best_s * 1.1 / 1.05)
    assert asked == [((4, 2, 0), below), (alone, below)]
    assert set(few) < set(ranked)
    scores = list(map(search.judge.score, ranked))
    assert scores == sorted(scores)
    assert scores[0] < best_s
    used = [used_counts(item.arrangement, len(whole)) for item in ranked if item not in few]
    assert any(sum(row[1:]) for row in used)


@pytest.mark.parametrize(
    ("degree", "searched"),
    [
        (1, [(1, 2), (1, 2, 4)]),
        (4, [(1, 2, 8), (1, 2), (1, 2, 4)]),
        (8, [(1, 2, 4), (1, 2)]),
    ],
)
def test_searches_leave_out_degrees_of_the_best_plan_and_all_above_each(degree, searched):
    """Of 20 devices a plan of degree 1 was the best, until moves to the highest were left out."""
    search = new_search(("A100-80GB", 8, 1))
    assert search.tp_degrees == (1, 2, 4, 8)
    asked = []

    def find_starts(estimators, part, below):
        asked.append(estimators[-1].tp_degrees)
        return []

    keeping = [estimator.keeping() for estimator in search.estimators]
    improver = Improver(search.judge, search.estimators, keeping, find_starts)
    one = (PipelineNodes((degree,), (0,)),)
    best = search.judge.better(one, search.estimator, below=float("inf"))
    assert improver.improve_with_fewer_degrees([best], 1) == [best]
    assert asked == searched


def test_what_searches_find_that_may_do_less_is_improved_freely_as_well(monkeypatch):
    # From 20.4 s, with all freedom, 128 devices behind a slow network end at 19.4 s, and from
    # 21.8 s, where a search for plans that recompute nothing begins, at 18.9 s.
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    equal = search.estimators[0]
    keeping = [equal.keeping(), equal.keeping().unequal()]
    few = search.starts.find_with_less(search.estimators, (0, 2, 2), float("inf"))
    more = search.starts.find_with_less([equal], None, float("inf"))
    search.judge.is_recomputing = True
    asked, improved = [], []

    def find_starts(estimators, *options):
        asked.append(([*estimators], *options))
        return [] if estimators == keeping else more

    def improve(candidates, judge, estimators, **options):
        found = improve_best(candidates, judge, estimators, **options)
        improved.append(([*candidates], [*estimators], found[0]))
        return found

    monkeypatch.setattr("lightning_hetero.planner.improving.improver.improve_best", improve)
    improver = Improver(search.judge, search.estimators, keeping, find_starts)
    ranked = improver.improve_with_less(few, 1)
    assert asked == [(keeping, None, float("inf")), ([equal], None, float("inf"))]
    (begin, less, with_less), (again, every, best) = improved
    assert (begin, less) == (more, [equal])
    assert (again, every) == ([with_less], [*search.estimators])
    assert ranked[0] == best
    assert set(few) < set(ranked)


@pytest.mark.parametrize("is_recomputing", [False, True])
def test_once_a_move_recomputes_plans_are_also_improved_as_if_none_could(
    monkeypatch, is_recomputing
):
    # Of 82 devices, no plan recomputed that moves began with; the best, 5 % faster, was found so.
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    few = search.starts.find_with_less(search.estimators, (0, 2, 2), float("inf"))
    keeping = [search.estimators[-1].keeping()]
    improved = []

    def improve(candidates, judge, estimators, **_options):
        improved.append(estimators)
        judge.is_recomputing = is_recomputing
        return [*candidates]

    monkeypatch.setattr("lightning_hetero.planner.improving.improver.improve_best", improve)
    search.judge.is_recomputing = False
    Improver(search.judge, search.estimators, keeping, search.starts.find_with_less).improve(few, 1)
    assert improved == [search.estimators, *([keeping] if is_recomputing else [])]


def test_a_thorough_search_far_from_the_bound_improves_what_may_do_less(monkeypatch):
    search = new_search(("V100-16GB", 2, 9), ("A100-80GB", 1, 15))
    improved, with_less = [], []
    improve_parts = Improver.improve_parts

    def pass_on(_self, candidates, _effort):
        return list(candidates)

    def with_less_freedom(_self, candidates, _effort):
        with_less.append(candidates)
        return list(candidates)

    def note(self, found, parts, smaller):
        improved.append((found, list(parts), improve_parts(self, found, parts, smaller)))
        return improved[-1][-1]

    monkeypatch.setattr(Improver, "improve", pass_on)
    monkeypatch.setattr(Improver, "improve_with_less", with_less_freedom)

    def note_longer(self, found):
        longer.append((found, improve_longer(self, found)))
        return longer[-1][-1]

    def note_starts(_self, found, starts):
        begun.append((found, starts))
        return found

    begun, longer, improve_longer = [], [], Improver.improve_longer
    monkeypatch.setattr(Improver, "improve_parts", note)
    monkeypatch.setattr(Improver, "improve_starts", note_starts)
    monkeypatch.setattr(Improver, "improve_longer", note_longer)
    best = search.run().best
    [(found, parts, ranked)] = improved
    assert with_less == [found]
    # Of 224 devices, 27 nodes of A100 alone are 1.6 % faster than what all devices lead to.
    cluster = search.cost.cluster
    assert sorted(parts) == sorted([*without_a_node(cluster), *of_some_types(cluster)])
    assert search.judge.score(ranked[0]) < search.judge.score(found[0])
    assert begun == [(ranked, found)]
    [(before, after)] = longer
    assert before == ranked
    assert best.simulation.iteration_time_s == pytest.approx(search.judge.score(after[0]))


def test_the_best_plans_are_improved_with_long_budgets(monkeypatch):
    # Of 336 devices, moves of layers and swaps are so many that usual budgets end among them. The
    # best plan of 87, 1.9 % faster, was found with long budgets as if shares were equal.
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    equal = search.estimators[0]
    keeping = [equal.keeping(), equal.keeping().unequal()]
    few = search.starts.find_with_less(search.estimators, (0, 2, 2), float("inf"))
    improved = []

    def improve(candidates, judge, estimator, **options):
        improved.append(([*candidates], estimator))
        return improve_long(candidates, judge, estimator, **options)

    monkeypatch.setattr("lightning_hetero.planner.improving.improver.improve_long", improve)
    search.judge.is_recomputing = True
    improver = Improver(search.judge, search.estimators, keeping, search.starts.find_with_less)
    ranked = improver.improve_longer(few)
    assert improved == [(few, search.estimators[-1]), (few, keeping[-1]), (few, equal)]
    assert set(few) < set(ranked)
    scores = list(map(search.judge.score, ranked))
    assert scores == sorted(scores)
    assert scores[0] < search.judge.score(few[0])


def test_more_nodes_are_left_out_as_long_as_that_helps():
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    few = search.starts.find_with_less(search.estimators, (0, 2, 2), float("inf"))
    asked = []

    def find_starts(estimators, part, _below):
        asked.append(part)
        return search.starts.find_with_less(estimators, part, float("inf"))

    improver = Improver(search.judge, search.estimators, (), find_starts)
    improver.improve_parts(few, [(4, 2, 0)], {(4, 2, 0): (4, 0, 0)}.get)
    assert asked == [(4, 2, 0), (4, 0, 0)]
    asked.clear()
    improver.improve_parts(few, [(0, 2, 0)], {(0, 2, 0): (0, 0, 2)}.get)
    assert asked == [(0, 2, 0)]


def test_so_many_nodes_are_left_out_and_no_more(monkeypatch):
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    few = search.starts.find_with_less(search.estimators, (0, 2, 2), float("inf"))
    asked, scores = [], {few[0]: 1.0}

    def find_starts(_estimators, part, _below):
        """Return a better plan each time."""
        asked.append(part)
        better = replace(few[0], num_microbatches=(len(asked),))
        scores[better] = 1.0 - len(asked) / 100
        return [better]

    monkeypatch.setattr(
        "lightning_hetero.planner.improving.improver.improve_long",
        lambda candidates, *_, **__: candidates,
    )
    judge = SimpleNamespace(score=scores.__getitem__, is_recomputing=False)
    improver = Improver(judge, search.estimators, (), find_starts)
    improver.improve_parts(few[:1], [(64,)], lambda part: (part[0] - 1,))
    assert asked == [(64 - number,) for number in range(32)]


def test_parts_that_fit_only_with_recomputation_are_improved_freely():
    # 40 T4 with llama-7b and 8,192 tokens: a part begins at 8.59 s, and at 10.03 s without.
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    equal = search.estimators[0]
    keeping = [equal.keeping(), equal.keeping().unequal()]
    few = search.starts.find_with_less(search.estimators, (0, 2, 2), float("inf"))
    asked = []

    def find_starts(estimators, part, _below):
        asked.append(estimators)
        is_free = estimators is search.estimators
        return search.starts.find_with_less(estimators, part, float("inf")) if is_free else []

    search.judge.is_recomputing = True
    improver = Improver(search.judge, search.estimators, keeping, find_starts)
    ranked = improver.improve_parts(few, [(4, 0, 0)], lambda part: None)
    assert asked == [keeping, search.estimators]
    assert search.judge.score(ranked[0]) < search.judge.score(few[0])


def test_likely_starts_get_long_budgets_two_of_each_number_of_pipelines(monkeypatch):
    # Of 84 devices, the plan that begins 7 % above the best one ended 6 % below what that became.
    search = new_search(("A100-80GB", 4, 1), ("T4", 2, 2))
    equal = search.estimators[0]
    keeping = [equal.keeping(), equal.keeping().unequal()]
    improved = []

    def improve(candidates, _judge, estimator, *, most):
        improved.append((candidates, estimator, most))
        return [better]

    def start(number, place):
        one = PipelineNodes((1,), (place,))
        return Candidate(
            arrangement=(one,) * number,
            layers=((8,),) * number,
            num_microbatches=(4,) * number,
        )

    best, better = start(3, 0), start(3, 9)
    scores = {best: 1.0, better: 0.9}
    scores |= {start(2, place): 1.01 + place / 100 for place in range(3)}
    scores |= {start(1, 0): 1.09, start(4, 0): 1.11}
    monkeypatch.setattr("lightning_hetero.planner.improving.improver.improve_long", improve)
    for is_recomputing in (False, True):
        judge = SimpleNamespace(score=scores.__getitem__, is_recomputing=is_recomputing)
        improver = Improver(judge, search.estimators, keeping, search.starts.find_with_less)
        starts = [item for item in scores if item != better]
        assert improver.improve_starts([best], starts) == [better, best]
    likely = [best, start(2, 0), start(2, 1), start(1, 0)]
    assert improved == [(likely, search.estimators[-1], 8), (likely, keeping[-1], 8)]


def test_leaving_a_node_out_leads_to_a_faster_plan_of_all():
    # Pipelines are dealt otherwise where a device is missing. Whatever else is improved, with twice
    # the effort and with less freedom, ends at 20.41 ms.
    search = new_search(("RTX-4090", 2, 13), ("V100-16GB", 2, 16), ("A100-80GB", 1, 29))
    improver = Improver(search.judge, search.estimators, (), search.starts.find_with_less)
    parts = without_a_node(search.cost.cluster)[2:]
    ranked = improver.improve_parts(search.starts.find(float("inf")), parts, lambda part: None)
    assert search.judge.score(ranked[0]) < 20.35e-3
