"""Plans of models too big to train whole, by `lightning-hetero plan`, against arithmetic."""

import json

import pytest

from lightning_hetero.cli import main
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.simulator import RooflineCost, StageShape, StateLayout

CASES = {
    "llama-70b": ({"RTX-4090": 1, "RTX-3090": 2}, "bf16-mixed"),
    "llama-13b": ({"T4": 1, "RTX-3060-12GB": 1}, "16-mixed"),
}


def planned(tmp_path, capsys, model, *more):
    devices, precision = CASES.get(model, CASES["llama-13b"])
    lines = [f"  - {{device: {name}, count: {count}}}" for name, count in devices.items()]
    (tmp_path / "cluster.yaml").write_text("nodes:\n" + "\n".join(lines) + "\n")
    sizes = ["--sequence-length", "1024", "--global-batch-size", "16", "--precision", precision]
    cluster = ["--cluster", str(tmp_path / "cluster.yaml")]
    code = main(["plan", *cluster, "--model", model, *sizes, "--json", *more])
    printed = capsys.readouterr()
    return code, json.loads(printed.out) if printed.out else printed.err


@pytest.mark.parametrize("model", CASES)
def test_qlora_of_a_model_that_fits_no_card_is_planned_as_counted_by_hand(tmp_path, capsys, model):
    code, found = planned(tmp_path, capsys, model, "--quantize", "nf4", "--lora-rank", "16")
    assert code == 0
    sizes, rows = ModelSpec.load(model), found["stages"]
    hidden, inner, key = sizes.hidden_size, sizes.intermediate_size, sizes.key_size
    matrices = 2 * hidden * (hidden + key) + 3 * hidden * inner
    adapters = 16 * (2 * (hidden + hidden) + 2 * (hidden + key) + 3 * (hidden + inner))
    table = 2 * sizes.vocab_size * hidden
    for row in rows:
        first, stop = row["first_layer"], row["end_layer"]
        layers = stop - first
        frozen = layers * (matrices * 4.5 / 8 + 2 * 2 * hidden) + 2 * hidden * inner
        frozen += table * (first == 0) + (table + 2 * hidden) * (stop == sizes.num_layers)
        assert row["frozen_bytes"] == pytest.approx(frozen, rel=1e-6)
        assert row["weights_bytes"] == pytest.approx(2 * layers * adapters, rel=1e-6)
        assert row["gradients_bytes"] == pytest.approx(4 * layers * adapters, rel=1e-6)
        assert row["tp_degree"] == 1
    assert sum(row["end_layer"] - row["first_layer"] for row in rows) == sizes.num_layers
    assert sum(row["owned_bytes"] for row in rows) == pytest.approx(
        16 * adapters * sizes.num_layers, rel=1e-3
    )


def test_the_folder_of_an_adapter_is_planned_as_its_base_with_lora(tmp_path, capsys):
    config = {"peft_type": "LORA", "r": 16, "target_modules": "all-linear"}
    config["base_model_name_or_path"] = "llama-13b"
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    quantized = ["--quantize", "nf4"]
    code, found = planned(tmp_path, capsys, str(tmp_path), *quantized)
    _, same = planned(tmp_path, capsys, "llama-13b", *quantized, "--lora-rank", "16")
    assert (code, found["stages"]) == (0, same["stages"])


def test_a_backward_of_frozen_layers_takes_as_long_as_their_forward():
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=1),))
    shape = StageShape("A100-80GB", 1, 8)
    layout = StateLayout.of_precision("bf16-mixed")
    whole, frozen, packed = (
        RooflineCost(cluster, ModelSpec.load("llama-13b").tuned(**how), layout=layout)
        for how in ({}, {"lora_rank": 16}, {"lora_rank": 16, "quantize": "nf4"})
    )
    (forward, backward), (same, inputs) = (c.compute_s(shape, (1024,) * 4) for c in (whole, frozen))
    assert same == pytest.approx(forward, rel=0.02)
    assert 1.9 < backward / forward < 2.1
    assert 0.95 < inputs / same < 1.15
    assert packed.compute_s(shape, (1024,))[0] > frozen.compute_s(shape, (1024,))[0]


def test_the_same_model_without_quantization_fits_nowhere(tmp_path, capsys):
    code, text = planned(tmp_path, capsys, "llama-13b")
    assert (code, "fits nowhere" in text) == (2, True)


def test_tensor_parallelism_of_quantized_layers_is_refused(tmp_path, capsys):
    more = ["--quantize", "int8", "--tp-degrees", "2"]
    code, text = planned(tmp_path, capsys, "llama-70b", *more)
    assert code == 2
    assert "tensor parallelism of degree 2 can't cut" in text
