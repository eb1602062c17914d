"""Whatever is in a file, it is read or refused in one of our own errors, which says where."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import (
    ClusterError,
    HeteroError,
    ModelError,
    PlanError,
    ProfileError,
)
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.profile import Profile
from lightning_hetero.core.texts import show

CLUSTER = {
    "nodes": [{"device": "A100-80GB", "count": 4, "price_per_hour": 2.5}],
    "inter_node_bytes_per_s": 5e10,
    "inter_node_latency_s": 1e-5,
    "links": [{"nodes": [0, 0], "bytes_per_s": 1e9, "latency_s": 1e-6}],
    "devices": [
        {
            "name": "mine",
            "peak_flops_per_s": 1e14,
            "memory_bytes": 2**34,
            "memory_bytes_per_s": 5e11,
            "intra_node_bytes_per_s": 2e10,
        }
    ],
}
MODEL = ModelSpec.load("llama-7b").to_dict() | {"head_dim": 128, "causal": True}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 11008,
    "vocab_size": 32000,
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "text_config": None,
}
PLAN = {
    "pipelines": [
        {"stages": [{"ranks": [0], "layers": [0, 4]}], "num_microbatches": 3},
        {"stages": [{"ranks": [1], "layers": [0, 1]}, {"ranks": [2], "layers": [1, 4]}]},
    ]
}
PROFILE = {
    "format": 1,
    "model": MODEL,
    "versions": {"torch": "2.13.0"},
    "date": "2026-01-31T12:00:00+00:00",
    "devices": [
        {
            "device": "mine",
            "times": [
                {
                    "tp_degree": 1,
                    "lengths": [128],
                    "blocks": {"1": [0.1, 0.2], "2": [0.2, 0.4]},
                    "embedding": [0.1, 0.1],
                    "head": [0.1, 0.1],
                }
            ],
            "memory": [{"tp_degree": 1, "layer_bytes_per_token": 10.0}],
            "step_s_per_param": 1e-9,
            "includes_tp_traffic": False,
            "spec": CLUSTER["devices"][0],
        }
    ],
}
VALID = {"cluster": CLUSTER, "model": MODEL, "config": CONFIG, "plan": PLAN, "profile": PROFILE}
READ = {
    "cluster": Cluster.from_yaml,
    "model": lambda text: ModelSpec._parse(text, is_json=False, name="x"),
    "config": lambda text: ModelSpec._parse(text, is_json=True, name="x"),
    "plan": ParallelPlan.from_json,
    "profile": Profile._parse,
}


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


STRANGE = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            0,
            10**30,
            10**399,
            -(10**399),
            1e308,
            -0.0,
            1.5,
            "",
            "x",
            "1e999",
            "80 GiB",
            "2024-13-45",
            "range(0, 4)",
            [],
            {},
            [None],
            [[]],
            {"x": 1},
            ["a", 1],
            {"1": [1, 1], "01": [1, 1]},
            nested(50),
        ]
    ),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=5),
)


def places(data, path=()):
    yield path
    items = data.items() if isinstance(data, dict) else ()
    items = enumerate(data) if isinstance(data, list) else items
    for key, value in items:
        yield from places(value, (*path, key))


def changed(data, path, value):
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = changed(copy[path[0]], path[1:], value) if path[1:] else value
    return copy


@pytest.mark.filterwarnings("ignore:.*GB/s:UserWarning")
@pytest.mark.parametrize("kind", VALID)
@settings(max_examples=150)
@given(data=st.data())
def test_a_file_with_anything_anywhere_is_read_or_refused_in_our_words(kind, data):
    path = data.draw(st.sampled_from(sorted(places(VALID[kind]), key=repr)))
    wrong = changed(VALID[kind], path, data.draw(STRANGE))
    texts, said = [json.dumps(wrong)], []
    if kind in ("cluster", "model"):
        texts.append(yaml.safe_dump(wrong))
    for text in texts:
        try:
            READ[kind](text)
        except HeteroError as error:
            said.append(str(error))
    assert all(len(words) < 1500 and "\n" not in words for words in said)


def value_at(data, path):
    return value_at(data[path[0]], path[1:]) if path else data


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        (kind, path)
        for kind, data in VALID.items()
        for path in places(data)
        if type(value_at(data, path)) in (int, float)
        and path not in (("max_position_embeddings",), ("format",))
    ],
)
def test_true_is_no_number(kind, path):
    """YAML reads `count: yes` as true, which Python takes for 1. Llama learns no positions."""
    with pytest.raises(HeteroError):
        READ[kind](json.dumps(changed(VALID[kind], path, True)))


@pytest.mark.parametrize("kind", VALID)
@settings(max_examples=100)
@given(
    text=st.text(st.sampled_from("{}[]:,-&*!?|>'\"% \n\t0123456789.eE_xnaftimsp<=~@#"), max_size=40)
)
def test_any_text_is_read_or_refused_in_our_words(kind, text):
    with pytest.raises(HeteroError):
        READ[kind](text)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 900,
        "!!int ''",
        "!!bool maybe",
        "&a [*a]",
        "nodes: &a [*a]",
        "nodes: 0x" + "f" * 20_000,
        "nodes: 2024-13-45",
        "!!python/object:os.system {}",
        "? [a]\n: b",
        "\x00",
    ],
)
@pytest.mark.parametrize("kind", VALID)
def test_texts_that_parsers_stumble_over_are_refused_in_our_words(kind, text):
    with pytest.raises(HeteroError) as caught:
        READ[kind](text)
    assert len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("cluster", "nodes: [{device: T4, count: 1, count: 2}]"),
        ("model", "name: a\nname: b"),
        ("config", '{"hidden_size": 1, "hidden_size": 2}'),
        ("plan", '{"pipelines": [{"stages": [], "stages": []}]}'),
        ("profile", '{"format": 1, "format": 1}'),
    ],
)
def test_a_key_that_stands_twice_is_refused(kind, text):
    with pytest.raises(HeteroError, match="stands twice"):
        READ[kind](text)


def test_merged_keys_of_yaml_are_no_duplicates():
    text = "nodes:\n- &a {device: T4, count: 1}\n- {<<: *a, count: 2}"
    assert [node.count for node in Cluster.from_yaml(text).nodes] == [1, 2]


DEVICE = PROFILE["devices"][0]
TIMES, MEMORY = DEVICE["times"][0], DEVICE["memory"][0]
FIRST, SECOND = ("pipelines", 0), ("pipelines", 1)
STAGE = (*FIRST, "stages", 0)
TIMED = ("devices", 0, "times", 0)
WORDS = {
    "plan": [
        ((), [], r"\[\].*mapping"),
        ((), {"pipes": []}, "pipes.*pipelines"),
        (("pipelines",), {}, "`pipelines` is {}.*list"),
        (("pipelines",), [], "no pipelines.*at least one"),
        (FIRST, {"stage": []}, r"pipelines\[0\].*stages"),
        ((*FIRST, "stages"), [], "no stages.*at least one stage"),
        ((*FIRST, "num_microbatches"), "few", r"num_microbatches` is 'few'.*whole number"),
        ((*FIRST, "num_microbatches"), -2, "-2.*0 or more"),
        ((*FIRST, "microbatch_size"), 0, "microbatch_size is 0; it must be 1 or more"),
        ((*STAGE, "tp"), 1, r"pipelines\[0\].stages\[0\].*tp"),
        ((*STAGE, "ranks"), [], "no ranks.*at least one rank"),
        ((*STAGE, "ranks"), ["x"], r"ranks\[0\]` is 'x'.*whole number"),
        ((*STAGE, "ranks"), [3, -1], r"\[3, -1\].*start at 0"),
        ((*STAGE, "ranks"), [2], "Rank 2.*pipeline 0 stage 0.*pipeline 1 stage 1.*once"),
        ((*STAGE, "layers"), [0, 1, 2], r"layers` is \[0, 1, 2\].*\[first, last \+ 1\]"),
        ((*STAGE, "layers"), [0, 0], r"\[0, 0\).*at least one layer"),
        ((*STAGE, "layers"), [1, 4], r"In `pipelines\[0\]`.*layer 1.*skips.*at layer 0"),
        ((*STAGE, "layers"), [0, 3], r"\[3, 4\] layers.*end at layer 4"),
        ((*SECOND, "stages", 1, "layers"), [2, 4], r"layer 2.*end at 1.*skips.*at layer 1"),
        ((*SECOND, "stages", 1, "layers"), [0, 4], r"layer 0.*end at 1.*repeats.*at layer 1"),
        ((*STAGE, "recomputed_layers"), 5, r"5 of 4 layers.*0 \(none\)"),
        ((*STAGE, "selective_layers"), 5, "selective_layers 5.*4 of 4 layers"),
        ((*STAGE, "activation_budget_bytes"), 0, "must be 1 or more"),
        (("owner_shares",), [0, 0, 0], "one above 0"),
        (("owner_shares",), [1, -1, 0], "0 or more"),
        (("owner_shares",), [1], "has 1 entries"),
    ],
    "cluster": [
        ((), None, "None.*mapping"),
        ((), {"hosts": []}, "`hosts`.*add nodes"),
        (("nodes",), 3, "`nodes` is 3.*list"),
        (("nodes",), [], "no nodes.*at least one"),
        (("nodes", 0), "A10", r"`nodes\[0\]` is 'A10'.*mapping"),
        (("nodes", 0, "device"), "A11", "'A11'.*A100-80GB.*`devices:`"),
        (("nodes", 0, "count"), "two", "count` is 'two'.*whole number"),
        (("nodes", 0, "count"), 0, "count 0.*1 or more"),
        (("nodes", 0, "count"), True, r"`nodes\[0\].count` is True.*a number"),
        (("nodes", 0, "price_per_hour"), -1, "-1.*0 or more"),
        (("nodes", 0, "cuont"), 1, "Did you mean count instead of 'cuont'"),
        (("inter_node_latency_s",), "fast", "is 'fast'.*number of seconds.*'20 us'"),
        (("inter_node_bytes_per_s",), 0, "inter_node_bytes_per_s 0.*above 0"),
        (("links", 0, "nodes"), 0, r"`links\[0\].nodes` is 0.*list"),
        (("links", 0, "nodes"), [0, "x"], r"nodes\[1\]` is 'x'.*whole number"),
        (("links", 0, "nodes"), [0, 0, 0], r"\[0, 0, 0\].*at most 2"),
        (("links", 0, "nodes"), [0, 3], r"\[0, 3\].*nodes 0 to 0"),
        (("links", 0, "bytes_per_s"), 0, "bytes_per_s 0.*above 0"),
        (("links", 0, "latency_s"), -2, "-2.*0 or more"),
        (("links",), [CLUSTER["links"][0], CLUSTER["links"][0] | {"latency_s": 2}], "Keep one"),
        (("devices", 0, "memory_bytes"), 0, "'mine'.*memory_bytes 0"),
    ],
    "model": [
        ((), [1, 2], "mapping"),
        ((), {"num_layers": 3}, "Add name, hidden_size"),
        (("num_layers",), 0, "num_layers"),
        (("hidden_size",), 1.5, "hidden_size"),
        (("num_kv_heads",), 5, "heads"),
        (("max_positions",), -1, "max_positions"),
        (("gated_mlp",), "sometimes", "true or false"),
    ],
    "profile": [
        ((), [], "format list"),
        (("format",), 0, "format 0"),
        (("date",), "yesterday", "`date` is 'yesterday'; it must be a date"),
        (("date",), "2026-01-31", "time zone"),
        (("model",), {"name": "x"}, "`model.num_layers` is missing. Add"),
        (("versions",), 3, "`versions` is 3; it must be a mapping"),
        (("devices",), [], "at least one"),
        (("devices",), [{"device": "A10"}], r"`devices\[0\].times` is missing"),
        (("devices", 0, "step_s_per_param"), -1, "step_s_per_param -1.0; it must be 0 or more"),
        (("devices", 0, "times"), [TIMES] * 2, "twice"),
        (("devices", 0, "memory"), [MEMORY] * 2, "memory at TP 1 twice"),
        (("devices", 0, "spec", "name"), "other", "describes a device 'other'"),
        ((*TIMED, "tp_degree"), 1.5, "tp_degree` is 1.5"),
        ((*TIMED, "lengths"), [], "length"),
        ((*TIMED, "blocks"), {"2": [1, 1]}, "block"),
        ((*TIMED, "blocks"), {"1": [1, 1], "3": [1, 1]}, "block"),
        ((*TIMED, "blocks"), {"1": [-1, 1]}, "Times at TP 1"),
        (("between_nodes",), {"bytes_per_s": 0, "latency_s": 0}, "bytes_per_s 0.*above 0"),
    ],
}
KINDS = {"plan": PlanError, "cluster": ClusterError, "model": ModelError, "profile": ProfileError}


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [(kind, *case) for kind, cases in WORDS.items() for case in cases],
)
def test_a_wrong_value_is_refused_by_place_and_value_with_a_remedy(kind, path, value, said):
    with pytest.raises(KINDS[kind], match=said):
        READ[kind](json.dumps(changed(VALID[kind], path, value)))


LOADS = {
    "plan": ParallelPlan.load,
    "cluster": Cluster.load,
    "model": ModelSpec.load,
    "profile": Profile.load,
}


@pytest.mark.parametrize("kind", LOADS)
def test_a_file_that_is_missing_or_torn_is_named(tmp_path, kind):
    path = tmp_path / f"my-{kind}.yaml"
    with pytest.raises(KINDS[kind], match=f"my-{kind}.*(No such file|nor a YAML file)"):
        LOADS[kind](path)
    for content in (b"\xff\xfe\x00", b"{"):
        path.write_bytes(content)
        with pytest.raises(KINDS[kind], match=f"my-{kind}"):
            LOADS[kind](path)


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "1e999"])
def test_numbers_that_are_none_are_refused(constant):
    text = json.dumps(PROFILE).replace("1e-09", constant)
    assert constant in text
    with pytest.raises(HeteroError):
        Profile._parse(text)


def test_what_errors_show_is_short():
    for value in ("x" * 10_000, list(range(1000)), {i: i for i in range(999)}, 1 << 99_999):
        assert len(show(value)) <= 80
    loop = []
    loop.append(loop)
    assert len(show([loop] * 100)) <= 80
