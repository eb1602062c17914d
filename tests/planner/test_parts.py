"""The search never loses to a part of itself: fewer devices or degrees, equal shares."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanningError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner import PlanningOptions, Workload, plan
from lightning_hetero.planner.allowances import smaller_allowances
from lightning_hetero.planner.arrangement import PipelineNodes, used_nodes
from lightning_hetero.planner.estimating.estimator import Estimator
from lightning_hetero.planner.judge import Candidate, Judge
from lightning_hetero.planner.local_search import improve
from lightning_hetero.planner.search import PlanSearch
from lightning_hetero.planner.starting_points import propose_arrangements
from lightning_hetero.simulator import RooflineCost
from tests.benchmarks.search_laws import TOLERANCE, Task, slower_by
from tests.simulator.sailor import ROOT, SailorCost, load_profile, sailor_cluster

BERT = ModelSpec.load("bert-large")
DEVICES = ["A100-80GB", "RTX-4090", "T4"]


def iteration_s(nodes, model, workload, bytes_per_s=12.5e9) -> float:
    cluster = Cluster(
        nodes=tuple(Node(device=device, count=count) for device, count in nodes),
        inter_node_bytes_per_s=bytes_per_s,
    )
    try:
        return plan(cluster, model, workload).best.simulation.iteration_time_s
    except PlanningError:
        return float("inf")


@pytest.mark.parametrize("num_nodes", [7, 12])
def test_devices_behind_a_slow_network_are_left_idle(num_nodes):
    workload = Workload(sequence_length=512, global_batch_size=32)
    one, many = (
        iteration_s([("RTX-4090", 1)] * count, BERT, workload, 1.25e8) for count in (1, num_nodes)
    )
    assert many <= one


@pytest.mark.parametrize("num_nodes", [25, 32])
def test_one_micro_batch_is_planned_on_more_devices_than_the_model_has_layers(num_nodes):
    workload = Workload(sequence_length=512, global_batch_size=1)
    one = iteration_s([("A100-80GB", 1)], BERT, workload)
    assert iteration_s([("A100-80GB", 1)] * num_nodes, BERT, workload) <= one


# Five of the first eight nodes are the best: fewer of one type than all but one.
@example(
    nodes=[
        ("RTX-4090", 1),
        *[("A100-80GB", 2)] * 3,
        ("RTX-4090", 1),
        ("A100-80GB", 1),
        *[("A100-80GB", 2)] * 2,
        ("A100-80GB", 1),
    ],
    bytes_per_s=1.25e9,
    batch=32,
)
# The best plan has two pipelines; three are a little better until layers are moved.
@example(nodes=[("A10-24GB", 1)] * 7, bytes_per_s=50e9, batch=4)
@settings(deadline=None, max_examples=3)
@given(
    nodes=st.lists(
        st.tuples(st.sampled_from(DEVICES), st.sampled_from([1, 2])), min_size=8, max_size=9
    ),
    bytes_per_s=st.sampled_from([1.25e8, 1.25e9, 12.5e9]),
    batch=st.sampled_from([8, 32]),
)
def test_one_more_node_never_makes_the_best_plan_slower(nodes, bytes_per_s, batch):
    workload = Workload(sequence_length=512, global_batch_size=batch)
    fewer, all_of_them = (
        iteration_s(some, BERT, workload, bytes_per_s) for some in (nodes[:-1], nodes)
    )
    assert all_of_them <= fewer * 1.005


def test_parts_leave_out_types_nodes_and_devices_of_nodes():
    nodes = [Node(device=name, count=2) for name in ("A100-80GB", "T4", "T4")]
    parts = smaller_allowances(Cluster(nodes=tuple(nodes)), [1.0, 5.0, 5.0])
    assert len(parts) == len(set(parts))
    assert list(map(sum, parts)) == sorted(map(sum, parts))
    assert {(2, 0, 0), (0, 2, 2), (2, 2, 0), (1, 1, 1), (1, 0, 0), (0, 2, 0)} <= set(parts)
    assert (2, 2, 2) not in parts


def test_with_a_type_more_all_parts_and_the_cluster_before_are_parts():
    nodes = [Node(device="A100-80GB", count=8)] * 3 + [Node(device="T4", count=4)] * 5
    before = smaller_allowances(Cluster(nodes=tuple(nodes)), [1.0] * 3 + [5.0] * 5)
    for burden in (0.5, 2.0, 9.0):
        more = Cluster(nodes=(*nodes, Node(device="A10-24GB", count=1)))
        parts = smaller_allowances(more, [1.0] * 3 + [5.0] * 5 + [burden])
        assert {(*part, 0) for part in [*before, (8, 8, 8, 4, 4, 4, 4, 4)]} <= set(parts)


@given(
    nodes=st.lists(
        st.tuples(st.sampled_from(DEVICES), st.sampled_from([1, 2, 4])), min_size=1, max_size=6
    ),
    more=st.tuples(st.sampled_from(DEVICES), st.sampled_from([1, 2, 4])),
)
def test_with_any_node_more_all_parts_of_a_small_cluster_are_parts(nodes, more):
    found = []
    for some in (nodes, [*nodes, more]):
        cluster = Cluster(nodes=tuple(Node(device=name, count=count) for name, count in some))
        parts = [*smaller_allowances(cluster, [1.0] * len(some)), [count for _, count in some]]
        # Which of equal nodes are left out makes no difference.
        used = [[(*n, k) for n, k in zip(some, part, strict=True) if k] for part in parts]
        found.append({tuple(sorted(row)) for row in used if all(k == n for _, n, k in row)})
    assert found[0] <= found[1]


# It was slower with the node, since what leaves it out was not looked at. Two more such cases are
# among the random clusters of `python -m tests.benchmarks search`, which take too long for here.
@pytest.mark.parametrize(
    ("nodes", "more", "model", "workload", "bytes_per_s"),
    [
        pytest.param(
            [("V100-32GB", 8)] * 4 + [("A100-80GB", 8)] * 2,
            ("H800-80GB", 1),
            "bert-large",
            Workload(sequence_length=512, global_batch_size=8),
            50e9,
            id="two degrees without a third type",
        ),
        pytest.param(
            [("A100-80GB", 8), ("A10-24GB", 1), ("H800-80GB", 4), ("V100-16GB", 2)],
            ("A10-24GB", 1),
            "llama-7b",
            Workload(sequence_length=8192, global_batch_size=8, sequences_per_microbatch=4),
            1.25e9,
            id="parts that idle devices alone tell apart",
        ),
    ],
)
def test_a_node_that_does_not_help_is_left_out(nodes, more, model, workload, bytes_per_s):
    sizes = ModelSpec.load(model)
    fewer, all_of_them = (
        iteration_s(some, sizes, workload, bytes_per_s) for some in (nodes, [*nodes, more])
    )
    assert all_of_them <= fewer * 1.005


@pytest.mark.parametrize(
    ("bytes_per_s", "num_used", "num_worth_using"), [(12.5e9, 1, 3), (1.25e8, 3, 1)]
)
def test_improving_gives_idle_devices_pipelines_and_leaves_idle_what_holds_up(
    bytes_per_s, num_used, num_worth_using
):
    cluster = Cluster(
        nodes=(Node(device="A100-80GB", count=1),) * 3,
        inter_node_bytes_per_s=bytes_per_s,
    )
    workload = Workload(sequence_length=512, global_batch_size=32)
    estimator = Estimator(RooflineCost(cluster, BERT), workload, equal_microbatches=False)
    judge = Judge(estimator, lambda seconds, _arrangement: seconds)
    pipelines = tuple(PipelineNodes((1,), (node,)) for node in range(num_used))
    estimate = estimator.estimate(pipelines)
    improved = improve(Candidate.of(estimate), judge, estimator, budget=10_000)
    assert len(used_nodes(improved.arrangement)) == num_worth_using
    assert judge.score(improved) < 0.9 * judge.score(Candidate.of(estimate))


@pytest.mark.parametrize(
    ("types", "model", "batch", "length"),
    [
        ({"A100-80GB": 4, "V100-16GB": 5}, "gpt-neo-2.7b", 256, 2048),
        ({"H800-80GB": 5, "A10-24GB": 4}, "llama-7b", 128, 2048),
    ],
)
def test_what_equal_shares_alone_would_simulate_is_simulated_for_many_devices_too(
    types, model, batch, length
):
    nodes = [Node(device=name, count=8) for name, count in types.items() for _ in range(count)]
    cost = RooflineCost(Cluster(nodes=tuple(nodes)), ModelSpec.load(model))
    workload = Workload(sequence_length=length, global_batch_size=batch)

    def simulated(**options):
        search = PlanSearch(cost, workload, PlanningOptions(**options))
        return set(search._simulated(float("inf")))

    equal = simulated(equal_microbatches=True)
    assert equal
    assert equal <= simulated()


def test_plans_without_recomputation_are_tried_where_the_likeliest_recompute():
    # Seconds were estimated too low where recomputing makes room for others' states.
    task = Task(
        nodes=(("V100-16GB", 4), ("A10-24GB", 2), ("A100-80GB", 4), ("T4", 4)),
        model="llama-7b",
        workload=Workload(sequence_length=8192, global_batch_size=64),
        bytes_per_s=1.25e9,
    )
    slower = slower_by(task, "recomputation")
    assert slower is not None
    assert slower <= TOLERANCE


def test_owners_by_room_are_tried_however_much_too_slow_an_estimate_takes_them():
    # With estimates that stop at the best plan so far it takes 74.7 s, with owners alike 81.0 s.
    task = Task(
        nodes=(("RTX-4090", 2), ("V100-16GB", 8), ("RTX-2080", 1)),
        model="llama-7b",
        workload=Workload(sequence_length=8192, global_batch_size=64),
        bytes_per_s=1.25e8,
    )
    assert task.seconds(task.cost()) < 65.0


def test_two_stages_become_a_wide_one_elsewhere():
    # Two of degree 2 in the middle are better than one of degree 4 there, but not than one at the
    # end: without that move more degrees are 0.9 % slower.
    task = Task(
        nodes=(("H800-80GB", 8), ("V100-16GB", 8), ("RTX-4090", 8), ("A100-80GB", 4)),
        model="gpt-neo-2.7b",
        workload=Workload(sequence_length=512, global_batch_size=64),
        bytes_per_s=50e9,
    )
    assert task.best_s <= task.seconds(task.cost(), tp_degrees=(1, 4, 5)) * (1 + TOLERANCE)


@pytest.mark.parametrize("task", [
    Task(
        nodes=(("V100-32GB", 2),) * 7 + (("A100-80GB", 4),) * 2,
        model="llama-7b",
        workload=Workload(
            sequence_length=2048, global_batch_size=512, sequences_per_microbatch=2
        ),
        bytes_per_s=1.25e9,
    ),
    Task(
        nodes=(
            ("A100-80GB", 8), ("V100-16GB", 4), ("RTX-4090", 1), ("RTX-4090", 1), ("V100-32GB", 8),
        ),
        model="bert-large",
        workload=Workload(sequence_length=512, global_batch_size=64, sequences_per_microbatch=2),
        bytes_per_s=50e9,
    ),
])  # fmt: skip
def test_a_size_is_tried_whose_best_plan_is_far_from_that_of_the_size_before(task):
    """Of the layouts that were likeliest with one sample, none or the 63rd tells of it."""
    assert task.best_of_sizes_s <= task.best_s * (1 + TOLERANCE)


def test_what_an_estimate_replaces_is_simulated_too(monkeypatch):
    nodes = [("A100-80GB", 1), ("T4", 1)]
    workload = Workload(sequence_length=512, global_batch_size=32)
    monkeypatch.setattr(
        "lightning_hetero.planner.improver.improve_best",
        lambda candidates, judge, _, **__: sorted(candidates, key=judge.score),
    )
    expected = iteration_s(nodes, BERT, workload)
    honest = Estimator.estimate

    def hopeful(self, arrangement, below_s=float("inf")):
        """Return what takes longest, as if it were a little faster than what was found."""
        found = honest(self, arrangement, below_s)
        if found is None:
            return None
        counts = found.num_microbatches[1:] + found.num_microbatches[:1]
        layers = tuple(split[::-1] for split in found.layers)
        other = replace(found, layers=layers, num_microbatches=counts, time_s=0.99 * found.time_s)
        return replace(other, otherwise=found)

    monkeypatch.setattr(Estimator, "estimate", hopeful)
    assert iteration_s(nodes, BERT, workload) <= expected * (1 + TOLERANCE)


def test_moving_far_from_where_the_likeliest_plan_begins_leads_to_what_a_part_finds():
    # The best plan begins 20 % above the likeliest one, or leaves other devices idle than it.
    batch = {"sequence_length": 512, "sequences_per_microbatch": 4}
    unlike = Task(
        nodes=(*[("H800-80GB", 1)] * 3, ("A10-24GB", 4)),
        model="bert-large",
        workload=Workload(**batch, global_batch_size=64),
        bytes_per_s=1.25e9,
    )
    memory_bound = Task(
        nodes=(("RTX-2080", 8), ("RTX-4090", 4)),
        model="gpt-neo-2.7b",
        workload=Workload(**batch, global_batch_size=8),
        bytes_per_s=50e9,
    )
    for task, law in ((unlike, "a node"), (memory_bound, "recomputation")):
        slower = slower_by(task, law)
        assert slower is not None
        assert slower <= TOLERANCE


def test_a_thorough_search_leaves_local_optima():
    task = Task(
        nodes=(("A10-24GB", 4), *[("A100-80GB", 2)] * 3),
        model="llama-7b",
        workload=Workload(sequence_length=2048, global_batch_size=8),
        bytes_per_s=12.5e9,
    )
    thorough_s, usual_s = (
        task.seconds(task.cost(), thorough=thorough) for thorough in (True, False)
    )
    assert thorough_s < 0.995 * usual_s


@pytest.mark.parametrize(
    ("nodes", "sequence_length", "bytes_per_s"),
    [
        # The best plan gives few micro-batches to fast stages; and cuts a stage in two.
        ([*[("V100-16GB", 1)] * 5, ("RTX-4090", 8), ("A100-80GB", 8)], 512, 50e9),
        ([("A10-24GB", 4), *[("A100-80GB", 2)] * 3], 2048, 12.5e9),
    ],
)
def test_more_degrees_never_make_the_best_plan_slower(nodes, sequence_length, bytes_per_s):
    task = Task(
        nodes=tuple(nodes),
        model="llama-7b",
        workload=Workload(sequence_length=sequence_length, global_batch_size=8),
        bytes_per_s=bytes_per_s,
    )
    slower = slower_by(task, "TP degrees")
    assert slower is not None
    assert slower <= TOLERANCE


def test_whatever_is_proposed_with_one_degree_is_proposed_with_several():
    # So many devices that groupings aren't enumerated.
    nodes = [Node(device=name, count=8) for name in DEVICES for _ in range(2)]
    workload = Workload(sequence_length=512, global_batch_size=64)
    cost = RooflineCost(Cluster(nodes=tuple(nodes)), BERT)
    estimator = Estimator(cost, workload, equal_microbatches=False)
    several = set(propose_arrangements(estimator, [8] * 6, (1, 2, 4, 8), (1, 2, 4, 8)))
    for degree in (1, 4):
        assert set(propose_arrangements(estimator, [8] * 6, (degree,), (degree,))) <= several


def sailor_plan(model_name, fast, slow, workload, **options):
    cluster = sailor_cluster({"A100-40": fast, "V100-16": slow}, devices_per_node=4)
    devices = {node.device for node in cluster.nodes}
    profile = load_profile(model_name, devices)
    cost = SailorCost(cluster, model_name, profile)
    found = plan(cluster, profile.model, workload, PlanningOptions(**options), cost=cost)
    return found.best.simulation.iteration_time_s


@pytest.mark.skipif(not ROOT.exists(), reason=f"no profiles under {ROOT}")
def test_weak_devices_with_little_memory_never_make_a_large_model_slower():
    workload = Workload(sequence_length=2048, global_batch_size=512)
    times = [sailor_plan("OPT-30", 64, slow, workload) for slow in (0, 4, 16)]
    assert times == sorted(times, reverse=True)


@pytest.mark.skipif(not ROOT.exists(), reason=f"no profiles under {ROOT}")
@pytest.mark.parametrize("size", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_unequal_shares_are_never_slower_than_equal_ones_with_measured_costs(size):
    workload = Workload(sequence_length=2048, global_batch_size=1024, sequences_per_microbatch=size)
    free, equal = (
        sailor_plan("OPT-350", 32, 96, workload, equal_microbatches=only_equal)
        for only_equal in (False, True)
    )
    assert free <= equal


def test_estimates_price_messages_as_the_cost_model_does():
    class SlowMessages(RooflineCost):
        def activation_s(self, sender, receiver, num_tokens):
            return 10.0

    cluster = Cluster(nodes=(Node(device="T4", count=2),))
    workload = Workload(sequence_length=512, global_batch_size=8)
    estimator = Estimator(SlowMessages(cluster, BERT), workload, equal_microbatches=False)
    estimate = estimator.estimate((PipelineNodes((1,) * 2, (0, 0)),))
    assert estimate is not None
    assert estimate.time_s > 20.0


@pytest.mark.skipif(not ROOT.exists(), reason=f"no profiles under {ROOT}")
def test_a_plan_is_improved_that_only_becomes_the_best_by_it():
    # The fourth best beginning; where nothing can be recomputed it is among the first three.
    nodes = (("A100-40", 4),) * 5 + (("V100-16", 4),) * 8 + (("A100-80", 4),) * 5
    workload = Workload(sequence_length=2048, global_batch_size=1024)
    task = Task(nodes=nodes, model="GPT-Neo-2.7", workload=workload, bytes_per_s=None)
    slower = slower_by(task, "recomputation")
    assert slower is not None
    assert slower <= TOLERANCE
