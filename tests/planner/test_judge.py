"""What is not simulated could not have been better."""

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.planner import Workload
from lightning_hetero.planner.arrangement import PipelineNodes
from lightning_hetero.planner.estimator import Estimator
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
