"""Laws of the simulator: exact times where they can be derived, monotonicity, memory, errors."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.actions import Action, ActionKind, schedule_1f1b
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.simulator import (
    CostModel,
    MicroBatchShape,
    RooflineCost,
    StageShape,
    StateLayout,
    simulate,
    split_batch,
)
from lightning_hetero.simulator.memory import in_flight_tokens
from tests.simulator.closed_form import iteration_time_closed_form

FREE = 1e30  # bytes/s: a link that costs nothing


def spec(name: str, speed: float = 1.0) -> DeviceSpec:
    return DeviceSpec(
        name=name,
        peak_flops_per_s=speed,
        memory_bytes=2**40,
        memory_bytes_per_s=1e12,
        intra_node_bytes_per_s=FREE,
    )


def model_of(num_layers: int) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        num_layers=num_layers,
        hidden_size=8,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=16,
        vocab_size=100,
        gated_mlp=True,
        tied_embeddings=False,
    )


def cluster_of(num_ranks: int, *, inter_bytes_per_s: float = FREE, latency_s: float = 0.0):
    return Cluster(
        nodes=tuple(Node(device="slow" if r % 2 else "fast", count=1) for r in range(num_ranks)),
        inter_node_bytes_per_s=inter_bytes_per_s,
        inter_node_latency_s=latency_s,
        intra_node_latency_s=latency_s,
        devices=(spec("fast", 2.0), spec("slow", 1.0)),
    )


class LinearCost(CostModel):
    """A token of a layer takes 1 s forward and `ratio` s backward at speed 1; updates are free."""

    ratio = 2.0
    by_speed = False

    def measure_stage_s(
        self, shape: StageShape, microbatch: MicroBatchShape
    ) -> tuple[float, float]:
        speed = self.device(shape.device).peak_flops_per_s if self.by_speed else 1.0
        forward = shape.num_layers * sum(microbatch) / speed
        return forward, self.ratio * forward

    def activation_bytes(self, shape: StageShape, num_tokens: int) -> float:
        return 1000.0 * shape.num_layers * num_tokens

    def transient_bytes(self, shape: StageShape, num_tokens: int) -> float:
        return 0.0

    def step_s(self, shape: StageShape, num_owned: float) -> float:
        return 0.0


def pipeline_of(first_rank: int, layers: Sequence[int]) -> PipelinePlan:
    edges = [sum(layers[:index]) for index in range(len(layers) + 1)]
    return PipelinePlan(
        stages=tuple(
            StagePlan(ranks=(first_rank + s,), layers=range(edges[s], edges[s + 1]))
            for s in range(len(layers))
        )
    )


def plan_of(*splits: Sequence[int]) -> ParallelPlan:
    starts = [sum(map(len, splits[:index])) for index in range(len(splits))]
    return ParallelPlan(
        pipelines=tuple(
            pipeline_of(start, split) for start, split in zip(starts, splits, strict=True)
        )
    )


def speed_cost(num_ranks: int, num_layers: int, **options: float) -> LinearCost:
    cost = LinearCost(cluster_of(num_ranks, **options), model_of(num_layers))
    cost.by_speed = True
    return cost


stage_counts = st.integers(1, 5)
layer_splits = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 9))
def test_uniform_1f1b_without_communication_takes_exactly_p_minus_1_plus_m_slots(p, m, tokens):
    cost = LinearCost(cluster_of(p), model_of(p))
    simulation = simulate(plan_of([1] * p), cost, [[(tokens,)] * m])
    assert simulation.iteration_time_s == pytest.approx((p - 1 + m) * 3 * tokens)
    assert simulation.stage_busy == ((pytest.approx(m / (p - 1 + m)),) * p,)


@given(
    layer_splits | st.builds(lambda size, count: [size] * count, st.integers(1, 4), stage_counts),
    st.integers(1, 10),
)
def test_closed_form_bounds_the_simulation_and_equals_it_for_equal_stages(layers, m):
    cost = LinearCost(cluster_of(len(layers)), model_of(sum(layers)))
    plan, batches = plan_of(layers), [[(3, 2)] * m]
    simulated = simulate(plan, cost, batches).iteration_time_s
    closed = iteration_time_closed_form(plan, cost, batches)
    assert simulated <= closed * (1 + 1e-9)
    assert simulated >= max(15 * sum(layers), 15 * m * max(layers)) * (1 - 1e-9)
    if len(set(layers)) == 1:
        assert simulated == pytest.approx(closed)


@given(layer_splits, st.lists(st.integers(1, 20), min_size=1, max_size=8))
def test_the_busiest_stage_and_the_longest_passage_are_lower_bounds(layers, lengths):
    cost = speed_cost(len(layers), sum(layers))
    simulation = simulate(plan_of(layers), cost, [[(length,) for length in lengths]])
    stage_s = [3 * count * sum(lengths) / (1 if s % 2 else 2) for s, count in enumerate(layers)]
    passage_s = sum(seconds * max(lengths) / sum(lengths) for seconds in stage_s)
    assert simulation.iteration_time_s >= max(*stage_s, passage_s) * (1 - 1e-9)


@given(layer_splits, st.lists(st.integers(1, 20), min_size=1, max_size=8), st.data())
def test_a_faster_device_never_slows_an_iteration(layers, lengths, data):
    num_ranks, batches = len(layers), [[(length,) for length in lengths]]
    upgraded = data.draw(st.integers(0, num_ranks - 1))
    names = ["slow"] * num_ranks
    times = []
    for _ in range(2):
        cluster = Cluster(
            nodes=tuple(Node(device=name, count=1) for name in names),
            inter_node_bytes_per_s=FREE,
            devices=(spec("slow", 1.0), spec("fast", 2.0)),
        )
        cost = LinearCost(cluster, model_of(sum(layers)))
        cost.by_speed = True
        times.append(simulate(plan_of(layers), cost, batches).iteration_time_s)
        names[upgraded] = "fast"
    assert times[1] <= times[0] * (1 + 1e-9)


@given(layer_splits, layer_splits, st.integers(1, 6), st.floats(1e3, 1e6))
@settings(max_examples=50)
def test_a_slower_network_never_speeds_an_iteration_up(first, second, m, rate):
    layers = sum(first)
    splits = (first, [layers]) if len(second) == 1 else (first, [1] * layers)
    num_ranks = sum(map(len, splits))
    times = []
    for bytes_per_s in (rate, rate / 2):
        cost = speed_cost(num_ranks, layers, inter_bytes_per_s=bytes_per_s)
        batches = [[(7,)] * m, [(7,)] * m]
        times.append(simulate(plan_of(*splits), cost, batches).iteration_time_s)
    assert times[1] >= times[0] * (1 - 1e-9)


def test_messages_queue_on_their_link_while_stages_compute():
    # 8 tokens of 8 bf16 values at 16 B/s: 8 s a message; stages compute 8 + 16 s a micro-batch.
    cost = LinearCost(cluster_of(2, inter_bytes_per_s=16.0), model_of(2))
    simulation = simulate(plan_of([1, 1]), cost, [[(8,)] * 2], record_events=True)
    spans = {
        (e.kind, e.stage_index, e.microbatch_index): (e.start_s, e.end_s)
        for e in simulation.events
        if e.kind in ("F", "B", "SF", "SB")
    }
    assert spans["SF", 0, 0] == (8, 16)
    assert spans["F", 0, 1] == (8, 16)
    assert spans["SF", 0, 1] == (16, 24)
    assert spans["F", 1, 0] == (16, 24)
    assert spans["B", 1, 0] == (24, 40)
    assert spans["SB", 1, 0] == (40, 48)
    assert spans["B", 0, 0] == (48, 64)


def test_blocking_messages_keep_both_ends_from_computing():
    layout = StateLayout.replicated(blocking_messages=True)
    cost = LinearCost(cluster_of(2, inter_bytes_per_s=16.0), model_of(2), layout=layout)
    simulation = simulate(plan_of([1, 1]), cost, [[(8,)] * 2], record_events=True)
    starts = {(e.kind, e.stage_index, e.microbatch_index): e.start_s for e in simulation.events}
    assert starts["F", 0, 1] == 16  # sent 8-16
    assert starts["F", 1, 0] == 16
    assert starts["B", 1, 0] == 24
    assert starts["F", 1, 1] == 56  # sends 40-48, then receives 48-56


def test_push_ends_when_the_last_holder_has_sent_a_stage_worth_of_gradients():
    # Two replicas of one stage: each sends half of its gradients and receives as much.
    model = model_of(3)
    layout = StateLayout(overlap=False)
    rate = 100.0
    cost = LinearCost(cluster_of(2, inter_bytes_per_s=rate), model, layout=layout)
    simulation = simulate(plan_of([3], [3]), cost, [[(5,)], [(5,)]])
    params = 3 * model.params_per_layer + model.embedding_params + model.head_params
    move_s = params * 2 / 2 / rate
    compute_s = 3 * 5 * 3
    # Pulls overlap with the forward's 15 s, but for what the first layer needs and cannot hide.
    pulled = simulation.iteration_time_s - move_s - compute_s
    assert move_s - 15 <= pulled <= move_s


def test_overlapped_push_hides_behind_the_last_backward():
    model = model_of(4)
    # All pushes take 1.2 s of the last backward's 40 s.
    params = 4 * model.params_per_layer + model.embedding_params + model.head_params
    rate = params / 1.2
    times = {}
    for overlap in (True, False):
        layout = StateLayout(overlap=overlap)
        cost = LinearCost(cluster_of(2, inter_bytes_per_s=rate), model, layout=layout)
        times[overlap] = simulate(plan_of([4], [4]), cost, [[(5,)], [(5,)]]).iteration_time_s
    # The first layer and the embedding are ready only when the backward ends.
    exposed_s = (model.params_per_layer + model.embedding_params) / rate
    assert times[False] - times[True] == pytest.approx(1.2 - exposed_s)


def test_replicated_states_are_all_reduced_and_nothing_is_pulled():
    model = model_of(2)
    rate = 50.0
    layout = StateLayout.replicated()
    cost = LinearCost(cluster_of(3, inter_bytes_per_s=rate), model, layout=layout)
    simulation = simulate(plan_of([2], [2], [2]), cost, [[(5,)]] * 3)
    params = 2 * model.params_per_layer + model.embedding_params + model.head_params
    ring_s = 2 * 2 / 3 * params * 2 / rate
    assert simulation.iteration_time_s == pytest.approx(2 * 5 * 3 + ring_s)


def test_a_pipeline_without_work_neither_computes_nor_sends_but_receives():
    cost = speed_cost(4, 2, inter_bytes_per_s=1e4)
    plan = plan_of([1, 1], [1, 1])
    simulation = simulate(plan, cost, [[(5,)] * 3, []], record_events=True)
    assert simulation.stage_busy[1] == (0.0, 0.0)
    last_backward_s = max(event.end_s for event in simulation.events if event.kind == "B")
    assert simulation.iteration_time_s > last_backward_s
    assert math.isfinite(simulation.iteration_time_s)


@given(st.integers(1, 6), st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_memory_holds_at_most_num_stages_minus_stage_microbatches(p, lengths):
    model = model_of(p)
    cost = LinearCost(cluster_of(p), model)
    batches = [(length,) for length in lengths]
    simulation = simulate(plan_of([1] * p), cost, [batches])
    for s, used in enumerate(simulation.stage_memory_bytes[0]):
        shape = cost.shape_of(plan_of([1] * p).pipelines[0].stages[s])
        tokens = in_flight_tokens(batches, min(p - s, len(batches)))
        messages = model.hidden_bytes((s + 1 < p) * 2 * tokens)
        messages += model.hidden_bytes((s > 0) * (tokens + max(lengths)))
        states = cost.stage_memory(shape, 1, [], 1).states
        assert used == pytest.approx(states + 1000 * tokens + messages)
        assert tokens <= sum(sorted(lengths)[-(p - s) :])
        params = cost.num_stage_params(shape)
        # Weights in bf16, gradients summed in fp32; the pipelines share what they own.
        assert states == params * (2 + 4 + 16)
        assert cost.stage_memory(shape, 4, [], 1).states == params * (2 + 4 + 16 / 4)


def test_orders_say_what_runs_and_what_is_held():
    cost, plan, batches = speed_cost(2, 2), plan_of([1, 1]), [(3,), (1,), (2,)]
    usual = simulate(plan, cost, [batches])
    lists = [schedule_1f1b(stage_index=s, num_stages=2, num_microbatches=3) for s in range(2)]
    assert simulate(plan, cost, [batches], orders=[lists]) == usual
    split = [[Action(ActionKind(kind), s, m) for kind in "FIW" for m in range(3)] for s in range(2)]
    deep = simulate(plan, cost, [batches], orders=[split], record_events=True)
    # All forwards run first, and each micro-batch is held until its W.
    for index in range(2):
        more = deep.stage_memory[0][index].activations - usual.stage_memory[0][index].activations
        assert more == 1000 * (6 - [4, 3][index])
        own = {e.kind: e for e in deep.events if e.stage_index == index and e.microbatch_index == 2}
        assert own["W"].end_s - own["W"].start_s == own["I"].end_s - own["I"].start_s
        assert own["W"].start_s >= own["I"].end_s
    assert deep.stage_busy[0][0] * deep.iteration_time_s == pytest.approx(
        usual.stage_busy[0][0] * usual.iteration_time_s
    )
    with pytest.raises(PlanError, match="orders of pipeline 0"):
        simulate(plan, cost, [batches[:2]], orders=[lists])


def test_recording_events_changes_nothing():
    cost = RooflineCost(
        Cluster(nodes=(Node(device="A100-80GB", count=4), Node(device="H800-80GB", count=4))),
        ModelSpec.load("bert-large"),
    )
    plan = ParallelPlan.even(world_size=8, num_layers=24, num_stages=4)
    batches = split_batch(plan, global_batch_size=13, sequence_length=512)
    plain, recorded = (
        simulate(plan, cost, batches, record_events=record) for record in (False, True)
    )
    assert plain.iteration_time_s == recorded.iteration_time_s
    assert not plain.events
    computed = [e for e in recorded.events if e.kind in ("F", "B")]
    assert len(computed) == 13 * 4 * 2
    for pipeline in range(2):
        for stage in range(4):
            lane = [e for e in computed if (e.pipeline_index, e.stage_index) == (pipeline, stage)]
            ends = [0.0, *(e.end_s for e in lane)]
            assert all(e.start_s >= end for e, end in zip(lane, ends, strict=False))


def test_split_batch_takes_the_plans_numbers_and_shares_the_rest():
    two = plan_of([2], [2])
    assert [len(b) for b in split_batch(two, global_batch_size=5, sequence_length=8)] == [3, 2]
    fixed = ParallelPlan(
        pipelines=(
            PipelinePlan(stages=two.pipelines[0].stages, num_microbatches=4),
            two.pipelines[1],
        )
    )
    batches = split_batch(fixed, global_batch_size=10, sequence_length=8, microbatch_size=2)
    assert batches == [[(8, 8)] * 4, [(8, 8)]]
    sized = ParallelPlan(
        pipelines=tuple(
            replace(pipeline, num_microbatches=count, microbatch_size=size)
            for pipeline, count, size in zip(two.pipelines, (3, 4), (2, 1), strict=True)
        )
    )
    batches = split_batch(sized, global_batch_size=20, sequence_length=8, microbatch_size=2)
    assert batches == [[(8,) * 4] * 3, [(8, 8)] * 4]
    with pytest.raises(PlanError, match="4 micro-batches"):
        split_batch(fixed, global_batch_size=3, sequence_length=8)
    with pytest.raises(PlanError, match="multiple"):
        split_batch(fixed, global_batch_size=5, sequence_length=8, microbatch_size=2)


def test_plans_that_belong_to_another_model_cluster_or_batch_are_refused():
    cost = LinearCost(cluster_of(2), model_of(4))
    with pytest.raises(PlanError, match="1 pipelines but the plan has 2"):
        simulate(plan_of([4], [4]), cost, [[(5,)]])
    with pytest.raises(PlanError, match="some work"):
        simulate(plan_of([4]), cost, [[]])
    with pytest.raises(PlanError, match="3 layers but the model has 4"):
        simulate(plan_of([3]), cost, [[(5,)]])
    with pytest.raises(PlanError, match="rank 2 but the cluster has 2"):
        simulate(plan_of([2, 1, 1]), cost, [[(5,)]])


def test_pipelines_that_run_alike_take_as_long_as_each_by_itself():
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=4), Node(device="T4", count=4)))
    model = ModelSpec.load("bert-large")
    pipelines = [(0, 4), (1, 5), (2, 6), (3,), (7,)]
    layers = {1: [24], 2: [18, 6]}
    plan = ParallelPlan(
        pipelines=tuple(
            PipelinePlan(
                stages=tuple(
                    StagePlan(
                        ranks=(rank,), layers=pipeline_of(0, layers[len(ranks)]).stages[s].layers
                    )
                    for s, rank in enumerate(ranks)
                )
            )
            for ranks in pipelines
        )
    )
    batches = [[(512,)] * count for count in (8, 8, 7, 12, 3)]
    # The same schedule as a list of actions, so that the first pipeline isn't like the second.
    lists = [schedule_1f1b(stage_index=s, num_stages=2, num_microbatches=8) for s in range(2)]
    for layout in (StateLayout(), StateLayout.replicated()):
        cost = RooflineCost(cluster, model, layout=layout)
        together = simulate(plan, cost, batches)
        apart = simulate(plan, cost, batches, orders=[lists, None, None, None, None])
        assert together.iteration_time_s == pytest.approx(apart.iteration_time_s)
        for one, other in zip(together.stage_busy, apart.stage_busy, strict=True):
            assert one == pytest.approx(other)
        assert together.stage_busy[0] == together.stage_busy[1] != together.stage_busy[2]
        assert together.stage_memory == apart.stage_memory
