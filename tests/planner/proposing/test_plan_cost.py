import numpy as np
import pytest

from lightning_hetero.assign import assign_iteration
from lightning_hetero.assign.pipeline_cost import sequence_times_s
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import AssignmentError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.planner import plan_costs
from lightning_hetero.simulator.device_costs import RooflineCost

CLUSTER = Cluster(nodes=(Node(device="A100-80GB", count=4), Node(device="H800-80GB", count=4)))
MODEL = RooflineCost(CLUSTER, ModelSpec.load("llama-7b"))


def two_pipelines() -> ParallelPlan:
    """Return one pipeline of A100 and one of H800, two stages of TP 2 each."""
    return ParallelPlan(
        pipelines=tuple(
            PipelinePlan(
                stages=(
                    StagePlan(ranks=(base, base + 1), layers=range(16)),
                    StagePlan(ranks=(base + 2, base + 3), layers=range(16, 32)),
                )
            )
            for base in (0, 4)
        )
    )


def test_costs_follow_the_slowest_stage_of_the_cost_model() -> None:
    plan = two_pipelines()
    costs = plan_costs(plan, MODEL, context_length=16384)
    for pipeline, cost in zip(plan.pipelines, costs, strict=True):
        assert cost.num_stages == 2
        for length in (1024, 8192, 16384):
            slowest = max(
                sum(MODEL.compute_s(MODEL.shape_of(stage), (length,))) for stage in pipeline.stages
            )
            fitted = sequence_times_s(np.array([length]), cost)[0] + cost.c
            assert fitted == pytest.approx(slowest, rel=0.05)


def test_a_full_stage_is_just_below_its_memory() -> None:
    plan = two_pipelines()
    for pipeline, cost in zip(
        plan.pipelines, plan_costs(plan, MODEL, context_length=16384), strict=True
    ):

        def fits(length: int, pipeline: PipelinePlan = pipeline) -> bool:
            return all(
                MODEL.stage_memory(
                    MODEL.shape_of(stage), 2, [(length,)] * 2, pipeline.num_stages - index
                ).total
                <= MODEL.usable_bytes(MODEL.shape_of(stage).device)
                for index, stage in enumerate(pipeline.stages)
            )

        assert fits(cost.max_len)
        assert not fits(int(cost.max_len * 1.03) + 256)


def test_a_stage_without_memory_for_tokens_is_named() -> None:
    alone = ParallelPlan.even(world_size=8, num_layers=60)
    model = RooflineCost(CLUSTER, ModelSpec.load("llama-32b"))
    with pytest.raises(AssignmentError, match=r"Stage 0 keeps \d+\.\d GiB of states in 75.8 GiB"):
        plan_costs(alone, model, context_length=1024)


def test_the_faster_device_gets_more_tokens() -> None:
    costs = plan_costs(two_pipelines(), MODEL, context_length=16384)
    lengths = [600 + 13 * i for i in range(100)]
    found = assign_iteration(lengths, [costs])
    slow, fast = (
        sum(lengths[i] for batch in batches for i in batch) for batches in found.microbatches
    )
    assert fast > 1.2 * slow


@pytest.mark.parametrize("context_length", [16, 128, 129, 1000])
def test_short_contexts_are_costed_too(context_length: int) -> None:
    for cost in plan_costs(two_pipelines(), MODEL, context_length=context_length):
        assert cost.max_len >= context_length
        assert sequence_times_s(np.array([context_length]), cost)[0] + cost.c > 0
