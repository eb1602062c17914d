"""What is not simulated could not have been better."""

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import Workload
from lightning_hetero.planner.arrangement import PipelineNodes
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.estimating.memory_fit import settle_memory
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.simulator import RooflineCost
from tests.planner.every_plan import splits, tiny_model

CLUSTER = Cluster(nodes=(Node(device="A100-80GB", count=2), Node(device="T4", count=2)))
ONE, OTHER = PipelineNodes((1, 1), (1, 0)), PipelineNodes((1, 1), (0, 1))


def new_judge(memory_share: float) -> Judge:
    class Small(RooflineCost):
        def usable_bytes(self, device):
            return super().usable_bytes(device) * memory_share

    workload = Workload(sequence_length=2048, global_batch_size=6)
    estimator = Estimator(Small(CLUSTER, tiny_model(4)), workload, equal_microbatches=False)
    return Judge(estimator, lambda seconds, _arrangement: seconds)


@pytest.mark.parametrize("memory_share", [1.0, 0.2])
def test_scores_below_the_bar_are_exact_and_others_are_not_below_it(memory_share):
    exact = new_judge(memory_share)
    candidates = [
        Candidate(
            arrangement=(ONE, OTHER), layers=(one, other), num_microbatches=(count, 6 - count)
        )
        for one in splits(4, 2)
        for other in splits(4, 2)
        for count in (1, 3)
    ]
    scores = [exact.score(candidate) for candidate in candidates]
    finite = sorted(score for score in scores if score < float("inf"))
    assert len(finite) > 2
    for candidate, score in zip(candidates, scores, strict=True):
        if score < float("inf"):
            assert score == exact.plan(candidate)[1].iteration_time_s
    for bar in (finite[0], finite[1], finite[-1]):
        judge = new_judge(memory_share)
        for candidate, score in zip(candidates, scores, strict=True):
            found = judge.score(candidate, below=bar)
            assert found == score if score < bar else found >= bar
            assert judge.score(candidate) == score


def test_what_was_not_better_is_not_judged_again_under_other_names_of_equal_nodes():
    nodes = tuple([Node(device="A100-80GB", count=1)] * 4)
    workload = Workload(sequence_length=2048, global_batch_size=6)
    estimator = Estimator(
        RooflineCost(Cluster(nodes=nodes), tiny_model(4)), workload, equal_microbatches=False
    )
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    # Two pipelines on nodes of their own, the same on others, and two that share them.
    first, same, shared = (
        tuple(PipelineNodes((1, 1), row) for row in rows)
        for rows in (((0, 1), (2, 3)), ((3, 1), (0, 2)), ((0, 1), (0, 1)))
    )
    score = judge.score(judge.better(first, estimator, below=float("inf")))
    assert judge.better(first, estimator, below=score) is None
    simulated = judge.num_simulated
    estimate, estimated = estimator.estimate, []
    estimator.estimate = lambda arrangement: estimated.append(arrangement) or estimate(arrangement)
    assert judge.better(same, estimator, below=score) is None
    assert not estimated
    assert judge.num_simulated == simulated
    assert judge.better(same, estimator, below=score * 1.01) is not None
    judge.better(shared, estimator, below=float("inf"))
    assert estimated == [same, shared]


def test_memory_that_did_not_make_a_plan_better_is_not_settled_again(monkeypatch):
    candidate = Candidate(
        arrangement=(ONE, OTHER), layers=((2, 2), (2, 2)), num_microbatches=(3, 3)
    )
    score = new_judge(0.1).score(candidate)
    judge, settled = new_judge(0.1), []
    module = "lightning_hetero.planner.judge.settle_memory"

    def counted(*args, **options):
        settled.append(args)
        return settle_memory(*args, **options)

    monkeypatch.setattr(module, counted)
    for below in (score, score * 0.999, score * 1.001):
        assert (judge.better(candidate, judge.estimator, below=below) is None) == (below <= score)
    assert len(settled) == 2


def test_layers_of_a_move_are_also_those_of_stages_that_recompute_nothing():
    """Where layers may be recomputed, a stage with little room gets more of them, slower ones."""
    cluster = Cluster(
        nodes=tuple([Node(device="A10-24GB", count=1)] * 16), inter_node_bytes_per_s=1.25e8
    )
    workload = Workload(sequence_length=2048, global_batch_size=64, sequences_per_microbatch=4)
    cost = RooflineCost(cluster, ModelSpec.load("gpt-neo-2.7b"))
    estimator = Estimator(cost, workload, equal_microbatches=False)
    arrangement = tuple(PipelineNodes((1,) * 8, tuple(range(first, 16, 2))) for first in (0, 1))

    keeping = estimator.keeping()

    def best_s(moved_by, keeping):
        judge = Judge(estimator, lambda seconds, _arrangement: seconds, keeping)
        found = judge.better(arrangement, moved_by, below=float("inf"))
        assert found is not None
        assert judge.is_recomputing == (moved_by is estimator)
        return judge.score(found)

    with_keeping_s = best_s(estimator, {estimator: keeping})
    assert with_keeping_s < 0.95 * best_s(estimator, {})
    assert with_keeping_s == best_s(keeping, {})
