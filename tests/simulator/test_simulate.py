"""Laws of the simulator: exact times where they can be derived, monotonicity, memory, errors."""

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


layer_splits = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 9))
def test_uniform_1f1b_without_communication_takes_exactly_p_minus_1_plus_m_slots(p, m, tokens):
    cost = LinearCost(cluster_of(p), model_of(p))
    simulation = simulate(plan_of([1] * p), cost, [[(tokens,)] * m])
    assert simulation.iteration_time_s == pytest.approx((p - 1 + m) * 3 * tokens)
    (row,) = simulation.stages
    assert [known.busy for known in row] == [pytest.approx(m / (p - 1 + m))] * p


@given(layer_splits, st.booleans(), st.integers(1, 6), st.floats(1e3, 1e6), st.data())
@settings(max_examples=80)
def test_slower_networks_and_devices_never_speed_an_iteration_up(first, is_deep, m, rate, data):
    layers = sum(first)
    splits = first, [1] * layers if is_deep else [layers]
    num_ranks = sum(map(len, splits))
    slower = data.draw(st.integers(0, num_ranks - 1))

    def seconds(bytes_per_s: float, fast: Sequence[int]) -> float:
        cluster = cluster_of(num_ranks, inter_bytes_per_s=bytes_per_s)
        nodes = tuple(Node(device="fast" if r in fast else "slow", count=1) for r in ranks)
        cost = LinearCost(replace(cluster, nodes=nodes), model_of(layers))
        cost.by_speed = True
        return simulate(plan_of(*splits), cost, [[(7,)] * m] * 2).iteration_time_s

    ranks = range(num_ranks)
    usual_s = seconds(rate, ranks)
    assert seconds(rate / 2, ranks) >= usual_s * (1 - 1e-9)
    assert seconds(rate, [rank for rank in ranks if rank != slower]) >= usual_s * (1 - 1e-9)


def test_overlapped_push_hides_behind_the_last_backward():
    # Two replicas of one stage: each sends half of its gradients and receives as much.
    model = model_of(4)
    # All pushes take 1.2 s of the last backward's 40 s.
    params = 4 * model.params_per_layer + model.embedding_params + model.head_params
    rate = params / 1.2
    times = {}
    for overlap in (True, False):
        layout = StateLayout(overlap=overlap)
        cost = LinearCost(cluster_of(2, inter_bytes_per_s=rate), model, layout=layout)
        found = simulate(plan_of([4], [4]), cost, [[(5,)], [(5,)]])
        times[overlap] = found.iteration_time_s
        assert found.exchange_s == pytest.approx(found.iteration_time_s - 3 * 4 * 5)
    # The first layer and the embedding are ready only when the backward ends.
    exposed_s = (model.params_per_layer + model.embedding_params) / rate
    assert times[False] - times[True] == pytest.approx(1.2 - exposed_s)


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
        held = [found.stages[0][index].memory.activations for found in (deep, usual)]
        assert held[0] - held[1] == 1000 * (6 - [4, 3][index])
        own = {e.kind: e for e in deep.events if e.stage_index == index and e.microbatch_index == 2}
        assert own["W"].end_s - own["W"].start_s == own["I"].end_s - own["I"].start_s
        assert own["W"].start_s >= own["I"].end_s
    busy_s = [found.stages[0][0].busy * found.iteration_time_s for found in (deep, usual)]
    assert busy_s[0] == pytest.approx(busy_s[1])
    with pytest.raises(PlanError, match="orders of pipeline 0"):
        simulate(plan, cost, [batches[:2]], orders=[lists])


def test_split_batch_takes_the_plans_numbers_and_shares_the_rest():
    two = plan_of([2], [2])
    assert [len(b) for b in split_batch(two, global_batch_size=5, sequence_length=8)] == [3, 2]

    def numbered(*numbers: dict[str, int]) -> ParallelPlan:
        pairs = zip(two.pipelines, numbers, strict=True)
        return replace(two, pipelines=tuple(replace(p, **number) for p, number in pairs))

    fixed = numbered({"num_microbatches": 4}, {})
    batches = split_batch(fixed, global_batch_size=10, sequence_length=8, microbatch_size=2)
    assert batches == [[(8, 8)] * 4, [(8, 8)]]
    sized = numbered(
        {"num_microbatches": 3, "microbatch_size": 2}, {"num_microbatches": 4, "microbatch_size": 1}
    )
    batches = split_batch(sized, global_batch_size=20, sequence_length=8, microbatch_size=2)
    assert batches == [[(8,) * 4] * 3, [(8, 8)] * 4]
    with pytest.raises(PlanError, match="4 micro-batches"):
        split_batch(fixed, global_batch_size=3, sequence_length=8)
    with pytest.raises(PlanError, match="multiple"):
        split_batch(fixed, global_batch_size=5, sequence_length=8, microbatch_size=2)


@pytest.mark.parametrize(
    ("splits", "batches", "message"),
    [
        (([4], [4]), [[(5,)]], "1 pipelines but the plan has 2"),
        (([4],), [[]], "some work"),
        (([3],), [[(5,)]], "3 layers but the model has 4"),
        (([2, 1, 1],), [[(5,)]], "rank 2 but the cluster has 2"),
    ],
)
def test_plans_that_belong_to_another_model_cluster_or_batch_are_refused(splits, batches, message):
    with pytest.raises(PlanError, match=message):
        simulate(plan_of(*splits), LinearCost(cluster_of(2), model_of(4)), batches)


def test_pipelines_that_run_alike_take_as_long_as_each_by_itself():
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=4), Node(device="T4", count=4)))
    model = ModelSpec.load("bert-large")
    rows = [[(0, 0, 18), (4, 18, 24)], [(1, 0, 18), (5, 18, 24)], [(2, 0, 18), (6, 18, 24)]]
    rows += [[(3, 0, 24)], [(7, 0, 24)]]
    pipelines = [
        {"stages": [{"ranks": [rank], "layers": [start, stop]} for rank, start, stop in row]}
        for row in rows
    ]
    plan = ParallelPlan.from_dict({"pipelines": pipelines})
    batches = [[(512,)] * count for count in (8, 8, 7, 12, 3)]
    # The same schedule as a list of actions, so that the first pipeline isn't like the second.
    lists = [schedule_1f1b(stage_index=s, num_stages=2, num_microbatches=8) for s in range(2)]
    for layout in (StateLayout(), StateLayout.replicated()):
        cost = RooflineCost(cluster, model, layout=layout)
        together = simulate(plan, cost, batches)
        apart = simulate(plan, cost, batches, orders=[lists, None, None, None, None])
        assert together.iteration_time_s == pytest.approx(apart.iteration_time_s)
        for rows in zip(together.stages, apart.stages, strict=True):
            for one, other in zip(*rows, strict=True):
                assert one.busy == pytest.approx(other.busy)
                assert one.memory == other.memory
        assert together.stages[0] == together.stages[1] != together.stages[2]
