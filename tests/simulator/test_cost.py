"""Laws of the roofline and of profiles as costs."""

import dataclasses
import datetime
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.errors import PlanError, ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import StagePlan
from lightning_hetero.core.profile import BlockTimes, DeviceProfile, LayerMemory, Profile
from lightning_hetero.simulator import ProfileCost, RooflineCost, StageShape, StateLayout

CLUSTER = Cluster(
    nodes=(
        Node(device="A100-80GB", count=4),
        Node(device="H800-80GB", count=4),
        Node(device="A100-80GB", count=4),
    ),
    links=(Link(nodes=(0, 2), bytes_per_s=1e9, latency_s=1e-3),),
)
LLAMA = ModelSpec.load("llama-7b")
lengths_lists = st.lists(st.integers(1, 8192), min_size=1, max_size=5).map(tuple)


def profile_of(*, includes_tp_traffic=True, **changes) -> Profile:
    def times(tp, lengths, scale):
        return BlockTimes(
            tp_degree=tp,
            lengths=lengths,
            blocks={1: (1.0 * scale, 2.0 * scale), 2: (1.8 * scale, 3.8 * scale)},
            embedding=(0.1, 0.2),
            head=(0.3, 0.5),
        )

    devices = tuple(
        DeviceProfile(
            device=name,
            times=tuple(times(tp, (n,), n / tp / speed) for tp in (1, 2) for n in (100, 200)),
            memory=(
                LayerMemory(
                    tp_degree=1,
                    layer_bytes_per_token=7.0,
                    head_bytes_per_token=5.0,
                    embedding_bytes_per_token=3.0,
                ),
            ),
            step_s_per_param=2e-9,
            includes_tp_traffic=includes_tp_traffic,
        )
        for name, speed in (("A100-80GB", 1.0), ("H800-80GB", 2.0))
    )
    profile = Profile(
        model=LLAMA,
        devices=devices,
        versions={},
        date=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    )
    return dataclasses.replace(profile, **changes)


@given(lengths_lists, st.sampled_from([1, 2, 4]), st.integers(1, 16))
@settings(max_examples=50)
def test_roofline_grows_with_layers_and_tokens_and_never_beats_the_peak(lengths, tp, layers):
    cost = RooflineCost(CLUSTER, LLAMA)
    shape = StageShape("A100-80GB", tp, layers)
    forward, backward = cost.compute_s(shape, lengths)
    peak = cost.device("A100-80GB").peak_flops_per_s * tp
    flops = LLAMA.linear_flops_per_layer(sum(lengths)) + LLAMA.attention_flops_per_layer(lengths)
    assert forward >= layers * flops / peak
    assert backward >= 2 * layers * flops / peak
    more = cost.compute_s(shape._replace(num_layers=layers + 1), lengths)
    longer = cost.compute_s(shape, (*lengths, 1))
    assert more > (forward, backward)
    assert longer[0] >= forward
    assert longer[1] >= backward
    # Sequences that are packed don't look at each other.
    assert forward + backward <= sum(cost.compute_s(shape, (sum(lengths),)))


def test_all_parameters_are_held_once_a_pipeline_but_key_heads_that_ranks_share():
    tied = RooflineCost(CLUSTER, ModelSpec.load("bert-large"))
    whole = StageShape("A100-80GB", 1, 24, has_embedding=True, has_head=True)
    assert tied.num_stage_params(whole) == tied.model.num_params
    cost = RooflineCost(CLUSTER, LLAMA)
    for cuts in ((0, 32), (0, 1, 3, 32), (0, 10, 20, 31, 32)):
        stages = enumerate(itertools.pairwise(cuts))
        plans = [StagePlan(ranks=(n,), layers=range(*ends)) for n, ends in stages]
        held = sum(cost.num_stage_params(cost.shape_of(stage)) for stage in plans)
        assert held == LLAMA.num_params
    few = dataclasses.replace(LLAMA, num_kv_heads=2)
    cost = RooflineCost(CLUSTER, few)
    shapes = {degree: StageShape("A100-80GB", degree, 4) for degree in (2, 4)}
    held = {degree: degree * cost.num_stage_params(shape) for degree, shape in shapes.items()}
    assert held[2] == 4 * few.params_per_layer
    assert held[4] - held[2] == 4 * 2 * few.hidden_size * few.key_size
    owned = {degree: degree * cost.num_owned_params(shape, 1) for degree, shape in shapes.items()}
    assert owned[4] == owned[2] == held[2]


def test_a_stage_is_as_slow_as_its_slowest_device_and_link_and_holds_what_its_smallest_does():
    cost = RooflineCost(CLUSTER, LLAMA)
    mixed = cost.shape_of(StagePlan(ranks=(0, 4), layers=range(4)))
    assert mixed.device == "A100-80GB"
    across = cost.shape_of(StagePlan(ranks=(0, 1, 8), layers=range(4)))
    assert across.link == (1e9, 1e-3)
    inside = cost.shape_of(StagePlan(ranks=(0, 1, 2), layers=range(4)))
    assert sum(cost.compute_s(across, (512,))) > sum(cost.compute_s(inside, (512,)))
    for order in (("A100-80GB", "A100-40GB"), ("A100-40GB", "A100-80GB")):
        cluster = Cluster(nodes=tuple(Node(device=name, count=1) for name in order))
        stage = StagePlan(ranks=(0, 1), layers=range(4))
        assert RooflineCost(cluster, LLAMA).shape_of(stage).device == "A100-40GB"
    devices = tuple(
        dataclasses.replace(device, device=name)
        for device, name in zip(profile_of().devices, ("H800-80GB", "A100-80GB"), strict=True)
    )
    measured = ProfileCost(CLUSTER, LLAMA, profile_of(devices=devices))
    assert measured.shape_of(StagePlan(ranks=(0, 4), layers=range(4))).device == "H800-80GB"


def test_transfers_use_the_clusters_links_and_larger_groups_get_activations_in_pieces():
    cost = RooflineCost(CLUSTER, LLAMA)
    assert cost.transfer_s(0, 8, 1e9) == pytest.approx(1.001)
    assert cost.transfer_s(0, 4, 50e9) == pytest.approx(1 + 10e-6)
    assert cost.transfer_s(0, 1, 300e9) == pytest.approx(1 + 3e-6)
    assert cost.all_reduce_s((3,), 1e9) == 0
    assert cost.all_reduce_s((0, 8), 1e9) == pytest.approx(2 * (0.5 + 1e-3))
    one = StagePlan(ranks=(0,), layers=range(1))
    pair = StagePlan(ranks=(2, 3), layers=range(1, 2))
    num_bytes = LLAMA.hidden_bytes(100, 2)
    pieces_s = 2 * cost.transfer_s(0, 2, num_bytes / 2) + cost.transfer_s(2, 3, num_bytes / 2)
    assert cost.activation_s(one, pair, 100) == pytest.approx(pieces_s)
    assert cost.activation_s(pair, one, 100) == pytest.approx(cost.transfer_s(0, 2, num_bytes))


def test_profiled_times_and_memory_replace_estimates_and_others_are_fitted():
    cost = ProfileCost(CLUSTER, LLAMA, profile_of())
    shape = StageShape("A100-80GB", 1, 3, has_embedding=True, has_head=True)
    assert cost.compute_s(shape, (200,)) == pytest.approx((2.8 * 200 + 0.4, 5.8 * 200 + 0.7))
    assert cost.compute_s(shape, (150,)) == pytest.approx((2.8 * 150 + 0.4, 5.8 * 150 + 0.7))
    assert cost.compute_s(shape, (100, 50)) == pytest.approx(cost.compute_s(shape, (150,)))
    assert cost.activation_bytes(shape, 10) == 10 * (3 * 7 + 3)
    assert cost.transient_bytes(shape, 10) == 50
    assert cost.step_s(shape, 1e9) == pytest.approx(2.0)
    # Of degree 2 no memory was measured, and maybe not what travels between its ranks.
    shape = StageShape("A100-80GB", 2, 2)
    roofline = RooflineCost(CLUSTER, LLAMA)
    assert cost.activation_bytes(shape, 10) == roofline.activation_bytes(shape, 10)
    without = ProfileCost(CLUSTER, LLAMA, profile_of(includes_tp_traffic=False))
    added = 2 * without.layer_traffic_s(shape, 100)
    assert added > 0
    expected = tuple(seconds + added for seconds in cost.compute_s(shape, (100,)))
    near = pytest.approx(expected, rel=0, abs=added / 10)
    assert without.compute_s(shape, (100,)) == near


def test_selective_layers_cost_a_tenth_of_a_forward_and_one_of_two_sums_over_their_group():
    cost, batch = RooflineCost(CLUSTER, LLAMA), (2048, 100)
    alone = StageShape("A100-80GB", 1, 4, recomputed_layers=1, selective_layers=2)
    layer_s = cost.compute_s(alone.layer, batch)[0]
    assert cost.recompute_s(alone, batch) == pytest.approx(1.2 * layer_s)
    shared = alone._replace(tp_degree=2)
    layer_s, traffic_s = cost.compute_s(shared.layer, batch)[0], cost.layer_traffic_s(shared, 2148)
    selective_s = 0.1 * (layer_s - traffic_s) + traffic_s / 2
    assert cost.recompute_s(shared, batch) == pytest.approx(layer_s + 2 * selective_s)
    kept, of_input = cost.layer_bytes(shared)
    bytes_of = [kept, of_input, *[cost.selective_bytes(shared)] * 2]
    memory = cost.stage_memory(shared, 1, [batch], 1)
    assert memory.activations == pytest.approx(2148 * sum(bytes_of))


def test_compiled_layers_recompute_as_a_whole_what_others_do_selectively():
    stage = StagePlan(ranks=(0,), layers=range(4), recomputed_layers=1, selective_layers=2)
    eager = RooflineCost(CLUSTER, LLAMA)
    compiled = RooflineCost(CLUSTER, LLAMA, layout=StateLayout(selective=False))
    whole = dataclasses.replace(stage, recomputed_layers=3, selective_layers=None)
    assert compiled.shape_of(stage) == eager.shape_of(whole) == compiled.shape_of(whole)
    for cost, saves in ((eager, True), (compiled, False)):
        shape = cost.shape_of(stage)
        assert (cost.selective_bytes(shape) < cost.layer_bytes(shape)[0]) is saves


def test_what_belongs_to_another_model_cluster_or_device_is_refused():
    cost = RooflineCost(CLUSTER, LLAMA)
    with pytest.raises(PlanError, match="rank 12"):
        cost.shape_of(StagePlan(ranks=(12,), layers=range(4)))
    with pytest.raises(PlanError, match="32 layers"):
        cost.shape_of(StagePlan(ranks=(0,), layers=range(40)))
    with pytest.raises(ProfileError, match="other sizes"):
        ProfileCost(CLUSTER, ModelSpec.load("llama-13b"), profile_of())
    with pytest.raises(ProfileError, match="H800"):
        ProfileCost(CLUSTER, LLAMA, profile_of(devices=profile_of().devices[:1]))


def test_the_terms_of_memory_add_up_and_buffers_take_the_room_of_activations():
    cost = RooflineCost(CLUSTER, LLAMA)
    shape = StageShape("A100-80GB", 1, 8, has_embedding=True)
    held = cost.num_stage_params(shape)
    assert 0.9 * 80 * 2**30 < cost.usable_bytes("A100-80GB") < 79 * 2**30
    idle = cost.stage_memory(shape, 4, [], 3)
    # Three quarters of the gradients leave, and three peers send the quarter that stays.
    assert idle.exchange == pytest.approx(2 * held * 2 * 3 / 4)
    assert (idle.weights, idle.gradients, idle.owned) == (held * 2, held * 4, held * 16 / 4)
    busy = cost.stage_memory(shape, 4, [(4096,)] * 3, 3)
    assert busy.activations == cost.activation_bytes(shape, 3 * 4096)
    assert busy.messages == LLAMA.hidden_bytes(2 * 3 * 4096)
    passing = busy.activations + busy.messages
    assert busy.exchange == max(0, idle.exchange - passing)
    assert busy.total == pytest.approx(busy.states + max(passing, idle.exchange))
    last = cost.stage_memory(StageShape("A100-80GB", 1, 8, has_head=True), 4, [(4096,)], 1)
    assert last.head == 10 * LLAMA.vocab_size * 4096
    assert last.weights == 2 * (8 * LLAMA.params_per_layer + LLAMA.head_params)
    replicated = RooflineCost(CLUSTER, LLAMA, layout=StateLayout.replicated())
    assert replicated.stage_memory(shape, 4, [], 1).owned == 4 * idle.owned
