"""Wrong plans, clusters, models and profiles are refused by place and value, with a remedy."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.core.actions import Assignment
from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import DeviceSpec, find_device
from lightning_hetero.core.errors import (
    AssignmentError,
    ClusterError,
    ConfigurationError,
    HeteroError,
    ModelError,
    PlanError,
    ProfileError,
)
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.core.profile import BlockTimes, LinkTimes, Profile
from lightning_hetero.exchange.holders import holdings_of
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec

NODE = Node(device="A10", count=2)
TWO = ParallelPlan.even(world_size=2, num_layers=3)
SPEC = DeviceSpec(
    name="x",
    peak_flops_per_s=1,
    memory_bytes=1,
    memory_bytes_per_s=1,
    intra_node_bytes_per_s=1,
)
QKV = ParameterSpec(name="qkv", shape=(18, 2), layer=0, tp_dim=0, tp_blocks=3)
TIMES = BlockTimes(tp_degree=1, lengths=(8,), blocks={1: (1.0, 2.0)})


def stage(ranks: tuple[int, ...], start: int, stop: int, **kept: int) -> StagePlan:
    return StagePlan(ranks=ranks, layers=range(start, stop), **kept)


def pipeline(*stages: StagePlan, **options: int) -> PipelinePlan:
    return PipelinePlan(stages=stages, **options)


def plan(*pipelines: PipelinePlan, **options: Any) -> ParallelPlan:
    return ParallelPlan(pipelines=pipelines, **options)


def even(world_size: int, num_layers: int, num_stages: int, **options: Any) -> ParallelPlan:
    return ParallelPlan.even(
        world_size=world_size, num_layers=num_layers, num_stages=num_stages, **options
    )


def own(spec: ParameterSpec | None, rule: str, weights: Any = None) -> Any:
    specs = [] if spec is None else [spec]
    return assign_owners(specs, TWO, world_size=2, ownership=Ownership(rule), weights=weights)


def owned_by(*shares: float) -> ParallelPlan:
    return dataclasses.replace(TWO, owner_shares=shares)


def two_links() -> Cluster:
    links = [Link(nodes=(0, 1), bytes_per_s=5, latency_s=1)]
    links.append(Link(nodes=(1, 0), bytes_per_s=5, latency_s=2))
    return Cluster(nodes=(NODE, NODE), links=tuple(links))


def assigned(*microbatches: Any) -> Assignment:
    return Assignment(plan_index=1, microbatches=microbatches, latency_s=2.5)


def sized(**changes: Any) -> ModelSpec:
    return dataclasses.replace(ModelSpec.load("bert-large"), **changes)


def timed(**changes: Any) -> BlockTimes:
    return dataclasses.replace(TIMES, **changes)


OBJECTS: list[tuple[type[HeteroError], Callable[[], Any], str]] = [
    (PlanError, lambda: stage((), 0, 1), "no ranks.*Give it at least one rank"),
    (PlanError, lambda: stage((3, -1), 0, 1), r"\[3, -1\].*start at 0"),
    (PlanError, lambda: stage((4,), 2, 2), r"\[4\].*\[2, 2\).*at least one layer"),
    (PlanError, lambda: stage((4,), -1, 2), r"\[4\].*\[-1, 2\)"),
    (PlanError, lambda: stage((4,), 0, 3, recomputed_layers=4), r"4 of 3 layers.*0 \(none\)"),
    (
        PlanError,
        lambda: stage((4,), 0, 3, recomputed_layers=2, selective_layers=2),
        r"selective_layers 2.*1 of 3 layers.*0 \(none\) to 1",
    ),
    (PlanError, lambda: stage((4,), 0, 3, activation_budget_bytes=0), "must be 1 or more"),
    (
        PlanError,
        lambda: stage((4,), 0, 3, recomputed_layers=1, activation_budget_bytes=10**9),
        "recomputed_layers 1.*activation_budget_bytes 1000000000.*Give one of them",
    ),
    (PlanError, lambda: StagePlan(ranks=(4,), layers=range(0, 4, 2)), r"\[4\].*\[0, 4\)"),
    (PlanError, lambda: pipeline(), "no stages.*at least one stage"),
    (PlanError, lambda: pipeline(stage((0,), 0, 1), num_microbatches=-2), "-2.*0 or more"),
    (PlanError, lambda: pipeline(stage((7,), 1, 2)), r"\[7\].*layer 1.*skips.*at layer 0"),
    (
        PlanError,
        lambda: pipeline(stage((0,), 0, 2), stage((1,), 3, 4)),
        r"Stage 1.*\[1\].*layer 3.*end at 2.*skips.*start at layer 2",
    ),
    (
        PlanError,
        lambda: pipeline(stage((0,), 0, 2), stage((1,), 1, 4)),
        "Stage 1.*layer 1.*end at 2.*repeats.*start at layer 2",
    ),
    (PlanError, lambda: even(6, 4, 2, tp_degree=(1, 2, 3)), r"2 stages.*one degree for each"),
    (PlanError, lambda: even(6, 4, 1, tp_degree=()), "6 processes.*num_stages × tp_degree"),
    (PlanError, lambda: even(6, 8, 4), "6 processes.*4 stages.*divides 6"),
    (PlanError, lambda: even(4, 3, 4), "3 layers.*4 stages.*at most 3"),
    (PlanError, lambda: even(4, 3, 0), "4 processes.*0 stages"),
    (PlanError, lambda: plan(), "no pipelines.*at least one"),
    (
        PlanError,
        lambda: plan(pipeline(stage((0,), 0, 2)), pipeline(stage((1,), 0, 3))),
        r"\[2, 3\] layers.*end at layer 3",
    ),
    (
        PlanError,
        lambda: plan(pipeline(stage((0,), 0, 2), num_microbatches=0)),
        "num_microbatches 0.*at least one must have work",
    ),
    (
        PlanError,
        lambda: plan(pipeline(stage((5,), 0, 2)), pipeline(stage((5,), 0, 2))),
        "Rank 5.*pipeline 0 stage 0.*pipeline 1 stage 0.*once",
    ),
    (PlanError, lambda: TWO.check_world_size(1), "rank 1.*1 process.*Start 2 processes"),
    (PlanError, lambda: TWO.check_num_layers(6), "3 layers.*has 6.*end at layer 6"),
    (PlanError, lambda: owned_by(1.0), "has 1 entries"),
    (PlanError, lambda: owned_by(0, 0), "one above 0"),
    (PlanError, lambda: owned_by(1, -1), "0 or more"),
    (
        PlanError,
        lambda: owned_by(1, 2).check_world_size(3),
        "owner_shares are for 2 ranks but 3 processes",
    ),
    (ConfigurationError, lambda: own(None, "memory"), "needs a plan that says how much"),
    (ConfigurationError, lambda: own(None, "even", [1.0]), "2 numbers of 0 or more"),
    (ConfigurationError, lambda: own(None, "even", [1.0, -1.0]), "2 numbers of 0 or more"),
    (ConfigurationError, lambda: own(None, "even", [0.0, 0.0]), "2 numbers of 0 or more"),
    (ConfigurationError, lambda: own(None, "even", [1.0, float("nan")]), "2 numbers of 0"),
    (
        ModelError,
        lambda: own(ParameterSpec(name="lost", shape=(4,), layer=None), "holders"),
        "lost .*no stage .*3 layers",
    ),
    (
        ModelError,
        lambda: own(ParameterSpec(name="lost", shape=(4,), layer=3), "parameter"),
        "lost .*no stage .*3 layers",
    ),
    (
        ModelError,
        lambda: list(holdings_of(QKV, even(4, 1, 1, tp_degree=4))),
        r"qkv .*\(18, 2\).* 4 equal .*divides 6",
    ),
    (ClusterError, lambda: Node(device="A10", count=0), "A10.*count 0.*1 or more"),
    (ClusterError, lambda: Node(device="A10", count=True), "count True.*whole number"),
    (ClusterError, lambda: Node(device="A10", count=1, price_per_hour=-1), "-1.*0 or more"),
    (ClusterError, lambda: Node(device="A10", count=1, price_per_hour=float("nan")), "nan"),
    (ClusterError, lambda: Link(nodes=(0, 1, 2), bytes_per_s=1), r"\[0, 1, 2\].*exactly two"),
    (ClusterError, lambda: Link(nodes=("a", 1), bytes_per_s=1), r"\['a', 1\].*index"),
    (ClusterError, lambda: Link(nodes=(0, 1), bytes_per_s=0), r"bytes_per_s 0.*above 0"),
    (ClusterError, lambda: Link(nodes=(0, 1), bytes_per_s=1, latency_s=-2), "-2.*0 or more"),
    (ClusterError, lambda: Cluster(nodes=()), "no nodes.*at least one"),
    (ClusterError, lambda: Cluster(nodes=(Node(device="A11", count=1),)), "'A11'.*A100-80GB"),
    (ClusterError, lambda: find_device("T5"), "'T5'.*Known: .*T4.*`devices:`"),
    (
        ClusterError,
        lambda: Cluster(nodes=(NODE,), inter_node_bytes_per_s=0),
        "inter_node_bytes_per_s is 0.*above 0",
    ),
    (
        ClusterError,
        lambda: Cluster(nodes=(NODE,), intra_node_latency_s=-1),
        "intra_node_latency_s is -1.*0 or more",
    ),
    (
        ClusterError,
        lambda: Cluster(nodes=(NODE,), links=(Link(nodes=(0, 3), bytes_per_s=1),)),
        r"\[0, 3\].*nodes 0 to 0",
    ),
    (ClusterError, two_links, "nodes 0 and 1.*latency_s 1.*latency_s 2.*Keep one"),
    (ClusterError, lambda: dataclasses.replace(SPEC, memory_bytes=0), "'x'.*memory_bytes 0"),
    (ClusterError, lambda: dataclasses.replace(SPEC, fp32_flops_per_s=-1.0), "-1.0.*above 0"),
    (ModelError, lambda: ModelSpec.load("llama-9000"), "bert-large.*llama-70b"),
    (ModelError, lambda: ModelSpec.load("llama-7b").tuned(lora_rank=0), "must be 1 or more"),
    (ModelError, lambda: sized(num_layers=0), "num_layers"),
    (ModelError, lambda: sized(hidden_size=1.5), "hidden_size"),
    (ModelError, lambda: sized(num_kv_heads=5), "heads"),
    (ModelError, lambda: sized(num_heads=7, num_kv_heads=7), "heads"),
    (ModelError, lambda: sized(vocab_size=True), "vocab_size"),
    (ModelError, lambda: sized(max_positions=-1), "max_positions"),
    (ProfileError, lambda: timed(blocks={2: (1.0, 1.0)}), "block"),
    (ProfileError, lambda: timed(blocks={1: (1.0, 1.0), 3: (1.0, 1.0)}), "block"),
    (ProfileError, lambda: timed(blocks={1: (-1.0, 1.0)}), "Times at TP 1"),
    (ProfileError, lambda: timed(blocks={1: (float("nan"), 1.0)}), "Times at TP 1"),
    (ProfileError, lambda: timed(lengths=()), "length"),
    (ProfileError, lambda: timed(tp_degree=0), "0"),
    (ProfileError, lambda: LinkTimes(bytes_per_s=0.0, latency_s=0.0), "Measure them again"),
    (ProfileError, lambda: LinkTimes(bytes_per_s=float("nan"), latency_s=0.0), "Measure them"),
    (ProfileError, lambda: LinkTimes(bytes_per_s=1e9, latency_s=-1e-6), "Measure them again"),
    (AssignmentError, lambda: assigned(((0, 2),), ((2,),)), "Sample 2 is assigned twice"),
    (AssignmentError, lambda: assigned(((0,), ())), "Micro-batch 1 of pipeline 0 is empty"),
    (AssignmentError, lambda: Assignment.from_dict([]), "assignment|mapping"),
    (AssignmentError, lambda: Assignment.from_dict({}), "assignment|mapping"),
    (
        AssignmentError,
        lambda: Assignment.from_dict({"plan_index": 0, "microbatches": 3}),
        "microbatches|assignment",
    ),
]


@pytest.mark.parametrize(("error", "build", "said"), OBJECTS)
def test_a_wrong_object_is_refused_with_its_values_and_a_remedy(error, build, said) -> None:
    with pytest.raises(error, match=said):
        build()


def pipelines_of(value: Any) -> str:
    return json.dumps({"pipelines": value})


def stages_of(**changes: Any) -> str:
    return pipelines_of([{"stages": [{"ranks": [0], "layers": [0, 1]} | changes]}])


LINKED = "{nodes: [{device: A10, count: 1}], links: [{nodes: NODES, bytes_per_s: 1GB/s}]}"
FILES: list[tuple[str, str | bytes, str]] = [
    ("plan.json", "[]", r"\[\].*mapping"),
    ("plan.json", '{"pipes": []}', "pipes.*pipelines"),
    ("plan.json", pipelines_of({}), "`pipelines` is {}.*list"),
    ("plan.json", pipelines_of([{"stage": []}]), r"pipelines\[0\].*stages"),
    ("plan.json", pipelines_of([{"stages": 3}]), r"`pipelines\[0\].stages` is 3.*list"),
    (
        "plan.json",
        pipelines_of([{"stages": [], "num_microbatches": "few"}]),
        r"`pipelines\[0\].num_microbatches` is 'few'.*whole number",
    ),
    ("plan.json", stages_of(tp=1), r"pipelines\[0\].stages\[0\].*tp"),
    ("plan.json", stages_of(ranks=["x"]), r"stages\[0\].ranks\[0\]` is 'x'.*whole number"),
    ("plan.json", stages_of(layers=[0, 1, 2]), r"layers` is \[0, 1, 2\].*\[first, last \+ 1\]"),
    ("plan.json", stages_of(layers=[1, 2]), r"In `pipelines\[0\]`.*starts at layer 1"),
    ("plan.json", b"\xff\xfe", r"plan\.json"),
    ("plan.json", b"{", r"plan\.json"),
    ("plan.json", pipelines_of([]), "no pipelines"),
    ("cluster.yaml", "nodes: [", "valid YAML"),
    ("cluster.yaml", "", "None.*mapping"),
    ("cluster.yaml", "hosts: []", "`hosts`.*add nodes"),
    ("cluster.yaml", "nodes: 3", "`nodes` is 3.*list"),
    ("cluster.yaml", "nodes: [A10]", r"`nodes\[0\]` is 'A10'.*mapping"),
    (
        "cluster.yaml",
        "nodes: [{device: A10, count: two}]",
        r"`nodes\[0\].count` is 'two'.*whole number",
    ),
    ("cluster.yaml", "nodes: [{device: A10, count: 1, price: 2}]", "price.*price_per_hour"),
    ("cluster.yaml", "nodes: [{device: T4, cuont: 1}]", "Did you mean count by 'cuont'"),
    (
        "cluster.yaml",
        "{nodes: [{device: A10, count: 1}], inter_node_latency_s: fast}",
        "`inter_node_latency_s` is 'fast'.*number of seconds.*'20 us'",
    ),
    ("cluster.yaml", LINKED.replace("NODES", "0"), r"`links\[0\].nodes` is 0.*list"),
    ("cluster.yaml", LINKED.replace("NODES", "[0, x]"), r"nodes\[1\]` is 'x'.*whole number"),
    ("cluster.yaml", b"\xff\xfe\x00", "cluster"),
    ("sizes.yaml", "num_layers: 3", "Add name, hidden_size"),
    ("sizes.yaml", "[1, 2]", "mapping"),
    ("sizes.yaml", "name: [", "not valid YAML"),
    (
        "sizes.yaml",
        json.dumps(ModelSpec.load("llama-7b").to_dict() | {"gated_mlp": "sometimes"}),
        "true or false",
    ),
    ("profile.json", '{"format": 1', "not valid JSON"),
]
LOADS: dict[str, tuple[Callable[[Path], Any], type[HeteroError]]] = {
    "plan.json": (ParallelPlan.load, PlanError),
    "cluster.yaml": (Cluster.load, ClusterError),
    "sizes.yaml": (ModelSpec.load, ModelError),
    "profile.json": (Profile.load, ProfileError),
}


@pytest.mark.parametrize(("name", "content", "said"), FILES)
def test_a_wrong_file_is_refused_by_name_place_and_value(tmp_path, name, content, said) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    load, error = LOADS[name]
    with pytest.raises(error, match=said) as caught:
        load(path)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", LOADS)
def test_a_missing_file_is_named(tmp_path, name) -> None:
    load, error = LOADS[name]
    with pytest.raises(error, match=f"{name}.*(No such file|nor a YAML file)"):
        load(tmp_path / name)


LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type 'IA3'.*Plan its base with --model llama-7b"),
        ({"use_dora": True}, "without use_dora"),
        ({"r": "4"}, "a whole r"),
        ({"r": 0}, "it must be 1 or more"),
        ({"target_modules": ["c_attn"]}, "matrices of llama-7b are"),
        ({"modules_to_save": ["score"]}, "modules_to_save"),
        ({"base_model_name_or_path": None}, "Write the folder or name of the model"),
        ({"base_model_name_or_path": "nowhere"}, "Unknown model 'nowhere'"),
    ],
)
def test_an_adapter_whose_size_is_unknown_is_refused(tmp_path, changed, message) -> None:
    config = LORA | {"base_model_name_or_path": "llama-7b"} | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        ModelSpec.load(tmp_path)
