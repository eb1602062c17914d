"""The search against every plan there is, its bound, its determinism and its errors."""

import datetime
import itertools
import random
from dataclasses import replace

import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.errors import PlanningError, ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.profile import BlockTimes, DeviceProfile, Profile
from lightning_hetero.planner import Objective, PlanningOptions, Workload, plan
from lightning_hetero.simulator import ProfileCost, RooflineCost, StateLayout
from tests.planner.every_plan import best_time, every_plan, time_of, tiny_cluster, tiny_model

FP16 = StateLayout.of_precision("16-mixed")  # V100 and T4 compute it faster than bf16.
GIB = 2**30


def assert_within_1_percent_of_all_plans(cluster, model, workload):
    cost = RooflineCost(cluster, model)

    def best_below(seconds):
        every = every_plan(cluster, model, workload.num_microbatches)
        return best_time(every, cost, workload.microbatch, below=seconds)

    try:
        result = plan(cluster, model, workload)
    except PlanningError as error:
        if "fits nowhere" in str(error) and best_below(float("inf")) == float("inf"):
            return
        raise
    found = time_of(result.best.plan, cost, workload.microbatch)
    assert found == pytest.approx(result.best.simulation.iteration_time_s)
    # What takes much longer is not looked at. If nothing else is found, that is too much below.
    best = best_below(found * 1.05)
    # Shares of ownership are numbers, of which brute force tries two rules only; and where a stage
    # recomputes selectively it tries all of its layers only, a thirtieth of their time.
    stages = [stage for _, _, stage in result.best.plan.iter_stages()]
    is_selective = any(stage.selective_layers for stage in stages)
    is_tried = result.best.plan.owner_shares is None and not is_selective
    least = best * (1 - 1e-9 if is_tried else 0.96 if is_selective else 0.99)
    assert least <= found <= best * 1.01
    assert result.lower_bound_s <= min(best, found) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("nodes", "num_layers", "num_microbatches", "bytes_per_s"),
    [
        (((100, 2, 80), (200, 2, 80)), 4, 4, 50e9),
        (((100, 2, 5), (312, 2, 5)), 5, 4, 2e9),
        # States that don't fit beside activations: recomputation, and owners where there is room.
        (((100, 1, 3.5), (200, 1, 5), (989, 1, 3.5)), 5, 6, 100e9),
        (((100, 4, 5), (312, 1, 10)), 4, 4, 50e9),
        (((70, 3, 2.5),), 4, 3, 50e9),
        # Cuts that agree keep gradients inside nodes, which a slow link makes worth it.
        (((70, 3, 20), (100, 2, 10)), 4, 4, 2e9),
        # One device before two, which take what little memory it has no room for.
        (((312, 1, 2.5), (989, 2, 2.5)), 4, 4, 12e9),
        # A slow link, where moving owners costs as much as computing.
        (((100, 1, 3.5), (200, 1, 5), (989, 1, 3.5)), 5, 4, 12e9),
    ],
)
def test_search_is_within_1_percent_of_all_plans(nodes, num_layers, num_microbatches, bytes_per_s):
    cluster = tiny_cluster(*nodes, bytes_per_s=bytes_per_s)
    workload = Workload(sequence_length=2048, global_batch_size=num_microbatches)
    assert_within_1_percent_of_all_plans(cluster, tiny_model(num_layers), workload)


# Those of the first 20 for which all plans take a few seconds.
@pytest.mark.parametrize("seed", sorted({*range(20)} - {3, 11, 14}))
def test_search_is_within_1_percent_of_all_plans_up_to_6_devices(seed):
    choose = random.Random(seed).choice
    counts = choose([(3, 2), (2, 2, 2), (3, 3), (4, 2), (1, 1, 2), (4, 1), (6,), (4, 1, 1)])
    memory = choose([80, 10, 5, 3.5, 2.5])
    nodes = [(choose([70, 100, 312, 989]), count, memory * choose([1, 2])) for count in counts]
    cluster = tiny_cluster(*nodes, bytes_per_s=choose([50e9, 12e9, 2e9]))
    model = tiny_model(choose([3, 4]), vocab_size=choose([1024, 32000]))
    workload = Workload(sequence_length=choose([1024, 4096]), global_batch_size=choose([2, 4]))
    assert_within_1_percent_of_all_plans(cluster, model, workload)


MIXED = Cluster(
    nodes=(
        Node(device="A100-80GB", count=4, price_per_hour=10.0),
        Node(device="H800-80GB", count=2, price_per_hour=15.0),
        Node(device="H20-96GB", count=2, price_per_hour=3.0),
    )
)
LLAMA = ModelSpec.load("llama-7b")
WORK = Workload(sequence_length=4096, global_batch_size=16)


@pytest.fixture(scope="module")
def mixed():
    """Return what the search finds for the mixed cluster, and the shares of progress it told."""
    shares = []
    return plan(MIXED, LLAMA, WORK, progress=lambda _what, share: shares.append(share)), shares


def test_the_plan_is_valid_fits_and_runs_all_micro_batches(mixed):
    result, shares = mixed
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(set(shares)) >= 4
    cost = RooflineCost(MIXED, LLAMA)
    for candidate in result.candidates:
        candidate.plan.check_world_size(MIXED.num_ranks)
        candidate.plan.check_num_layers(LLAMA.num_layers)
        assert sum(p.num_microbatches for p in candidate.plan.pipelines) == 16
        for rank in candidate.plan.ranks:
            used = candidate.simulation.memory_bytes[rank]
            assert used <= cost.usable_bytes(MIXED.device_of(rank).name)
        for _, _, stage in candidate.plan.iter_stages():
            assert len({MIXED.node_of(rank) for rank in stage.ranks}) == 1
    times = [candidate.simulation.iteration_time_s for candidate in result.candidates]
    assert times == sorted(times)
    assert len(times) == 5
    assert 0.0 < result.lower_bound_s <= times[0]


def test_unequal_micro_batches_are_faster_than_equal_ones_on_unequal_devices(mixed):
    free = mixed[0].best
    options = PlanningOptions(equal_microbatches=True, thorough=False)
    equal = plan(MIXED, LLAMA, WORK, options).best
    counts = {pipeline.num_microbatches for pipeline in equal.plan.pipelines}
    assert max(counts) - min(counts) <= 1
    assert free.simulation.iteration_time_s < 0.98 * equal.simulation.iteration_time_s


def test_a_plan_for_cost_is_cheaper_and_no_faster(mixed):
    fast = mixed[0].best
    options = PlanningOptions(objective=Objective.COST, tp_degrees=(1, 2), thorough=False)
    cheap = plan(MIXED, LLAMA, WORK, options).best
    assert cheap.money_per_token(WORK.num_tokens) <= fast.money_per_token(WORK.num_tokens)
    assert cheap.simulation.iteration_time_s >= fast.simulation.iteration_time_s
    assert len(cheap.plan.ranks) < len(fast.plan.ranks)


SIZES = {"sequence_length": 64, "global_batch_size": 16, "sequences_per_microbatch": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_degrees": (16,)}, "largest node has 4"),
        ({"tp_degrees": (3,)}, "doesn't divide the 32 heads"),
        ({"tp_degrees": ()}, r"tp_degrees are \(\); give one or more"),
        ({"tp_degrees": 2}, "tp_degrees are 2; give one or more"),
        ({"tp_degrees": (1, 1.5)}, r"A degree of tp_degrees is 1\.5"),
        ({"num_candidates": 0}, "num_candidates is 0"),
        ({"objective": "speed"}, "is 'speed'; it must be 'throughput' or 'cost'"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options, message):
    with pytest.raises(PlanningError, match=message):
        plan(MIXED, LLAMA, WORK, PlanningOptions(**options))


@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_whole_numbers_and_micro_batches_divide_the_batch(name):
    for value in (0, 1.5, "64", True, None):
        with pytest.raises(PlanningError, match=f"{name} is .*; it must be a whole number, 1 or"):
            Workload(**SIZES | {name: value})
    with pytest.raises(PlanningError, match="Choose a divisor"):
        Workload(**SIZES | {"sequences_per_microbatch": 5})


def test_a_model_that_fits_nowhere_and_a_missing_price_are_refused():
    with pytest.raises(PlanningError, match=r"fits nowhere.*GiB.*Add devices"):
        plan(MIXED, ModelSpec.load("llama-70b"), WORK)
    free = Cluster(nodes=(Node(device="A100-80GB", count=2),))
    with pytest.raises(PlanningError, match="price_per_hour"):
        plan(free, LLAMA, WORK, PlanningOptions(objective="cost"))


def test_cost_is_within_1_percent_of_all_plans_and_its_bound_holds():
    cluster = tiny_cluster((100, 2, 5), (312, 2, 5), bytes_per_s=12e9, price=1.0)
    model, workload = tiny_model(4), Workload(sequence_length=2048, global_batch_size=4)
    cost = RooflineCost(cluster, model)

    def price(candidate):
        used = {cluster.node_of(rank) for rank in candidate.ranks}
        per_hour = sum(cluster.nodes[node].price_per_hour for node in used)
        return per_hour / 3600 * time_of(candidate, cost, workload.microbatch)

    best = min(price(candidate) for candidate in every_plan(cluster, model, 4))
    result = plan(cluster, model, workload, PlanningOptions(objective=Objective.COST))
    assert best * (1 - 1e-9) <= price(result.best.plan) <= best * 1.01
    assert result.lower_bound_price <= best
    assert result.gap == pytest.approx(price(result.best.plan) / result.lower_bound_price - 1)


def test_nodes_too_small_for_every_degree_are_left_out_of_plans_for_cost():
    nodes = [Node(device="A100-80GB", count=n, price_per_hour=1.0 * n) for n in (1, 1, 4)]
    options = PlanningOptions(objective=Objective.COST, tp_degrees=(2, 4), thorough=False)
    workload = Workload(sequence_length=64, global_batch_size=8)
    best = plan(Cluster(nodes=tuple(nodes)), tiny_model(4), workload, options).best
    assert best.price_per_hour == 4
    assert set(best.plan.ranks) <= {2, 3, 4, 5}


def test_only_the_tp_degrees_of_the_profile_are_planned():
    nodes = [Node(device=name, count=2) for name in ("A100-80GB", "H800-80GB")]
    model = replace(ModelSpec.load("gpt-neo-2.7b"), num_kv_heads=1)  # Degrees may exceed them.
    workload = Workload(sequence_length=2048, global_batch_size=16)
    times = {
        degree: BlockTimes(tp_degree=degree, lengths=(2048,), blocks={1: (0.02, 0.04)})
        for degree in (2, 4)
    }
    profile = Profile(
        model=model,
        devices=(
            DeviceProfile(device="A100-80GB", times=(times[2], times[4])),
            DeviceProfile(device="H800-80GB", times=(times[2],)),
        ),
        versions={},
        date=datetime.datetime.now(datetime.UTC),
    )

    def best(counts):
        sized = [replace(node, count=n) for node, n in zip(nodes, counts, strict=True)]
        cluster = Cluster(nodes=tuple(sized))
        return plan(cluster, model, workload, cost=ProfileCost(cluster, model, profile)).best.plan

    assert {stage.tp_degree for _, _, stage in best((4, 4)).iter_stages()} == {2}
    with pytest.raises(ProfileError, match="TP degrees"):
        best((1, 1))


def test_stages_have_a_degree_each_where_that_is_faster_than_one_for_all():
    nodes = [Node(device="A100-40GB", count=1)] * 2 + [Node(device="V100-16GB", count=4)] * 2
    cluster = Cluster(nodes=tuple(nodes), inter_node_bytes_per_s=12.5e9)
    model = ModelSpec.load("gpt-neo-2.7b")
    workload = Workload(sequence_length=2048, global_batch_size=8)

    def best(tp_degrees):
        options = PlanningOptions(tp_degrees=tp_degrees, thorough=False)
        cost = RooflineCost(cluster, model, layout=FP16)
        return plan(cluster, model, workload, options, cost=cost)

    every, *alone = map(best, (None, (1,), (2,)))
    found_s = every.best.simulation.iteration_time_s
    assert any(len(set(p.tp_degrees)) > 1 for p in every.best.plan.pipelines)
    assert every.lower_bound_s <= found_s
    for one in alone:
        assert found_s < 0.95 * one.best.simulation.iteration_time_s


def test_no_plan_is_worse_than_the_one_that_runs(mixed):
    cost = RooflineCost(MIXED, LLAMA)
    running = ParallelPlan.even(world_size=8, num_layers=LLAMA.num_layers, num_stages=4)
    running = replace(
        running, pipelines=tuple(replace(p, num_microbatches=8) for p in running.pipelines)
    )
    options = PlanningOptions(tp_degrees=(4,), thorough=False)  # Few plans, all of them slower.
    for start in (running, mixed[0].best.plan):
        found = plan(MIXED, LLAMA, WORK, options, cost=cost, start=start).best.simulation
        assert found.iteration_time_s <= time_of(start, cost, WORK.microbatch)


@pytest.mark.parametrize("change", ["layers", "batch", "devices"])
def test_a_plan_that_cannot_run_here_is_no_start(change):
    model, workload = tiny_model(4), Workload(sequence_length=64, global_batch_size=8)
    cluster, options = tiny_cluster((100, 2, 10)), PlanningOptions(thorough=False)
    start = plan(cluster, model, workload, options).best.plan
    if change == "layers":
        model = tiny_model(5)
    elif change == "batch":
        workload = replace(workload, global_batch_size=9)
    else:
        cluster = tiny_cluster((100, 1, 10))
    every = [plan(cluster, model, workload, options, start=given) for given in (start, None)]
    assert every[0].candidates == every[1].candidates


LAYERS = tuple(enumerate((9, 8, 7)))


def by_hand(*pipelines):
    """Return the plan of pipelines: micro-batches, and the ranks and number of layers of stages."""
    rows = []
    for count, *stages in pipelines:
        stops = list(itertools.accumulate(layers for _, layers in stages))
        own = [
            {"ranks": list(ranks), "layers": [stop - layers, stop]}
            for (ranks, layers), stop in zip(stages, stops, strict=True)
        ]
        rows.append({"stages": own, "num_microbatches": count})
    return ParallelPlan.from_dict({"pipelines": rows})


@pytest.mark.parametrize(
    ("nodes", "bytes_per_s", "model", "length", "given"),
    [
        # Links are so slow that half of each pipeline is on each node, at two TP degrees.
        (
            [("A40", 6)] * 2,
            1.9e8,
            "gpt3-6.7b",
            512,
            by_hand(
                (8, ((0, 1), 13), ((4,), 2), ((6,), 5), ((8, 9), 12)),
                (8, ((2, 3), 13), ((5,), 2), ((7,), 5), ((10, 11), 12)),
            ),
        ),
        # Few micro-batches: 26 pipelines of one stage would run 3 at most, but only 2.5 on average.
        (
            [("Titan-RTX", 8)] * 14,
            6.4e9,
            "bert-large",
            512,
            by_hand(
                *[
                    (7, *((range(40 * s + 4 * p, 40 * s + 4 * p + 4), n) for s, n in LAYERS))
                    for p in range(8)
                ],
                (8, (range(32, 40), 11), (range(72, 76), 7), (range(76, 80), 6)),
            ),
        ),
    ],
)
def test_search_is_no_slower_than_plans_by_hand(nodes, bytes_per_s, model, length, given):
    cluster = Cluster(
        nodes=tuple(Node(device=name, count=count) for name, count in nodes),
        inter_node_bytes_per_s=bytes_per_s,
    )
    spec = ModelSpec.load(model)
    batch = sum(pipeline.num_microbatches for pipeline in given.pipelines)
    workload = Workload(sequence_length=length, global_batch_size=batch)
    cost = RooflineCost(cluster, spec)
    found = plan(cluster, spec, workload, cost=cost).best
    by_hand_s = time_of(given, cost, workload.microbatch)
    assert found.simulation.iteration_time_s <= by_hand_s * 1.005


@pytest.mark.parametrize("counts", [(4, 1), (1, 4), (2, 1), (4, 2, 1)])
def test_equal_devices_on_nodes_of_unequal_sizes_are_no_slower_than_the_largest_node(counts):
    workload, options = Workload(sequence_length=64, global_batch_size=8), PlanningOptions()
    every_s, alone_s = (
        plan(
            tiny_cluster(*[(100, count, 10) for count in row], bytes_per_s=1e9),
            tiny_model(4),
            workload,
            options,
        ).best.simulation.iteration_time_s
        for row in (counts, [max(counts)])
    )
    assert every_s <= alone_s * (1 + 1e-9)
