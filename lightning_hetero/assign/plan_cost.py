"""The assignment's view of a plan: what its pipelines cost by a cost model (Hydraulis Appendix B).

Any plan, also one with unequal devices and layer splits, becomes one `PipelineCost` per pipeline:
its slowest stage gives the latency coefficients, its fullest stage MaxLen.
"""

from lightning_hetero.assign.coefficients import StageMemory, pipeline_cost
from lightning_hetero.assign.cost import PipelineCost
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan
from lightning_hetero.simulator.cost import CostModel

__all__ = ["plan_costs"]

_SHORTEST = 128


def plan_costs(
    plan: ParallelPlan, model: CostModel, *, context_length: int
) -> tuple[PipelineCost, ...]:
    """Return the cost of every pipeline of a plan.

    Args:
        plan: The plan.
        model: Times and bytes of its stages.
        context_length: Longest sequence that the coefficients are fitted for.

    Raises:
        AssignmentError: A stage has no memory for tokens.
    """
    longest = max(context_length, 2 * _SHORTEST)  # A fit needs two lengths.
    count = (longest // _SHORTEST).bit_length()
    lengths = sorted({*(_SHORTEST << i for i in range(count)), longest})
    return tuple(
        _pipeline_cost(pipeline, model, lengths, plan.num_pipelines) for pipeline in plan.pipelines
    )


def _pipeline_cost(
    pipeline: PipelinePlan, model: CostModel, lengths: list[int], num_pipelines: int
) -> PipelineCost:
    shapes = [model.shape_of(stage) for stage in pipeline.stages]
    times_s = [[sum(model.compute_s(shape, (length,))) for length in lengths] for shape in shapes]
    longest = lengths[-1]
    stages = []
    for stage_index, shape in enumerate(shapes):
        num_in_flight = pipeline.num_stages - stage_index
        held = model.held_bytes(shape, longest)
        # Transient buffers and messages are of the one micro-batch that runs.
        passing = model.passing_bytes(shape, longest) / num_in_flight
        stages.append(
            StageMemory(
                capacity_bytes=model.usable_bytes(shape.device),
                state_bytes=model.fixed_bytes(shape, num_pipelines),
                bytes_per_token=(held + passing) / longest,
                num_in_flight=num_in_flight,
            )
        )
    return pipeline_cost(lengths, times_s, stages)
