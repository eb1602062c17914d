"""Laws of the start-up summary: it counts what is kept, and predicts only what is known."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_hetero.autoplan.engine_choices import state_memory
from lightning_hetero.autoplan.facts import BatchSizes, RunFacts
from lightning_hetero.autoplan.summary import StartUp
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership
from lightning_hetero.models import HeteroLM, LMConfig
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.sizes import infer_model_spec
from lightning_hetero.runtime.stage.recomputation import LayerOptions
from lightning_hetero.simulator import MemoryTerms, RooflineCost, simulate
from lightning_hetero.straggler.prediction import move_ranks
from tests.plans import pipeline, plan_of, stage

PLAN = ParallelPlan.from_dict(
    plan_of(pipeline(stage(0, 0, 4)), pipeline(stage(1, 0, 1), stage(2, 1, 4)))
)
A100S = Cluster(nodes=(Node(device="A100-80GB", count=3),))
ODD = Cluster(
    nodes=(Node(device="odd", count=3),),
    devices=(
        DeviceSpec(
            name="odd",
            peak_flops_per_s=1e12,
            memory_bytes=10 * 2**20,
            memory_bytes_per_s=1e10,
            intra_node_bytes_per_s=1e9,
        ),
    ),
)


def start(cluster: Cluster, plan: ParallelPlan = PLAN, **changes: Any) -> StartUp:
    model = HeteroLM(
        LMConfig(vocab_size=50, hidden_size=32, num_layers=4, num_heads=4, num_kv_heads=2)
    )
    layout = ModelLayout.of(model)
    comms: Any = SimpleNamespace(world_size=3, global_rank=0)
    facts = RunFacts(
        module=model,
        layout=layout,
        comms=comms,
        device=torch.device("cpu"),
        sizes=lambda: BatchSizes(samples=6, sequence_length=128),
        compute_bytes=2,
    )
    slices = assign_owners(layout.specs, plan, world_size=3, ownership=Ownership.EVEN)
    return StartUp(
        plan=plan,
        facts=replace(facts, **changes),
        cluster=cluster,
        device_names=("A10-24GB",) * cluster.num_ranks,
        auto=None,
        specs=layout.specs,
        slices=slices,
        num_batches=2,
        num_microbatches=3,
    )


def _states(found: StartUp, specs: Any) -> list[MemoryTerms]:
    return state_memory(PLAN, found.facts, specs, found.slices)


def test_each_weight_counts_where_it_is_held_and_its_states_where_it_is_owned():
    found = start(A100S)
    used = [item.total for item in _states(found, found.specs)]
    count = sum(spec.numel for spec in found.specs)
    # Two pipelines hold a 2-byte weight and sum an fp32 gradient; one owner keeps four such values.
    assert sum(used) == count * (2 * (2 + 4) + 4 * 4)
    whole = count * (2 + 4) + count / 3 * 16
    assert used[0] == pytest.approx(whole, rel=0.05)
    assert used[1] < used[2] < used[0]


def test_frozen_weights_need_neither_gradients_nor_moments():
    found = start(A100S)
    frozen = [replace(spec, requires_grad=False) for spec in found.specs]
    used = [item.total for item in _states(found, frozen)]
    assert sum(used) == sum(spec.numel for spec in frozen) * (2 * 2 + 4)


def test_a_given_plan_is_predicted_where_data_sheets_know_the_devices():
    found = start(A100S)
    model = infer_model_spec(found.facts.module, found.facts.layout)
    cost = RooflineCost(A100S, model, layout=found.facts.state_layout())
    # A loader's batch of 6 for each pipeline, in three micro-batches of 2.
    expected = simulate(PLAN, cost, [[(128, 128)] * 3] * 2)
    lines = str(found).splitlines()
    size = sum(parameter.numel() for parameter in found.facts.module.parameters())
    assert lines[0] == f"HeteroStrategy on 3 × A100-80GB: HeteroLM, {size:,} parameters in all"
    assert f"iteration time  {expected.iteration_time_s:.4g} s" in str(found)
    assert f"({12 * 128:,} tokens an iteration)" in str(found)
    assert f"limited by      {expected.bottleneck}" in lines
    assert lines[1].split()[-1] == "busy"


def test_layers_that_only_an_option_recomputes_are_predicted():
    kept = start(A100S)
    for value in ("full", 2, "selective"):
        again = start(A100S, layer_options=LayerOptions(activation_checkpointing=value))
        assert "computes activations again on stage" in str(again)
        fewer, most = (item.stage_facts[1][0].memory.activations for item in (again, kept))
        assert fewer < most
    said = replace(PLAN.pipelines[0].stages[0], recomputed_layers=0)
    plan = LayerOptions(activation_checkpointing=3).add_to(
        replace(PLAN, pipelines=(replace(PLAN.pipelines[0], stages=(said,)), PLAN.pipelines[1]))
    )
    assert [stage.recomputed_layers for _, _, stage in plan.iter_stages()] == [0, 1, 1]
    assert LayerOptions().add_to(PLAN) == PLAN
    assert kept.facts.state_layout().selective
    compiled = start(A100S, layer_options=LayerOptions(compile_layers=True))
    assert not compiled.facts.state_layout().selective, "a compiler chooses what it keeps"


def test_unknown_devices_get_no_figures_but_their_memory_nor_do_unknown_batches():
    text = str(start(ODD))
    assert "iteration time  not predicted: no data sheet has odd" in text
    assert " of 9.0" in text
    assert "tokens/s" not in text
    assert "busy" not in text
    text = str(start(A100S, sizes=lambda: BatchSizes(samples=None, sequence_length=128)))
    assert "not predicted: the sizes of model or batches aren't known" in text
    plan = ParallelPlan.even(world_size=2, num_layers=4, num_stages=1)
    assert "idle            1 of 3 devices" in str(start(A100S, plan))


def test_a_rank_has_room_for_anothers_place_only_if_its_device_holds_it_beside_what_it_owns():
    known = start(A100S).stage_facts
    (whole,), halves = ([stage.memory.total for stage in row] for row in known)

    def cluster(*memory_bytes: float) -> Cluster:
        devices = tuple(
            replace(A100S.device_of(0), name=f"odd{rank}", memory_bytes=round(size / 0.9) + 1)
            for rank, size in enumerate(memory_bytes)
        )
        nodes = tuple(Node(device=device.name, count=1) for device in devices)
        return Cluster(nodes=nodes, devices=devices)

    roomy = start(cluster(1.1 * whole, 1.1 * whole, 1.1 * halves[1]))
    swapped = {(a, b): move_ranks(PLAN, {a: b, b: a}) for a, b in ((0, 1), (0, 2))}
    assert roomy.has_room(PLAN)
    assert roomy.has_room(swapped[0, 1])
    assert not roomy.has_room(swapped[0, 2])
    # What a rank owns stays with it.
    by_one = replace(PLAN, owner_shares=(0, 1, 0))
    owning = assign_owners(roomy.specs, by_one, world_size=3, ownership=Ownership.MEMORY)
    assert not replace(roomy, slices=owning).has_room(swapped[0, 1])
    # A stage that takes another layer beside its one has twice the activations.
    low, high = PLAN.pipelines[1].stages
    stages = (replace(low, layers=range(2)), replace(high, layers=range(2, 4)))
    cut = replace(PLAN, pipelines=(PLAN.pipelines[0], replace(PLAN.pipelines[1], stages=stages)))
    states = state_memory(cut, roomy.facts, roomy.specs, roomy.slices)[low.ranks[0]].total
    activations = halves[0] - known[1][0].memory.states
    for share, fits in ((1.8, False), (2.1, True)):
        size = states + share * activations
        assert start(cluster(1.1 * whole, size, 1.1 * whole)).has_room(cut) == fits


def test_standbys_are_named_and_their_memory_counts():
    found = start(A100S)
    slices = assign_owners(
        found.specs, PLAN, world_size=3, ownership=Ownership.EVEN, standbys=(1, 2, 0)
    )
    both = replace(found, slices=slices)
    assert "each slice twice (of rank 0 by 1, 1 by 2, 2 by 0)" in str(both)
    assert "redundancy" not in str(found)
    owned = [sum(item.owned for item in _states(one, one.specs)) for one in (found, both)]
    assert owned[1] == 2 * owned[0]
