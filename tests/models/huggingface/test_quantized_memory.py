"""The memory of a process that reads its layers of a quantized folder, measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

WRITE = """
import sys, torch
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig
sizes = dict(hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, vocab_size=4096)
config = AutoConfig.for_model("llama", num_attention_heads=8, **sizes)
AutoModelForCausalLM.from_config(config).save_pretrained(sys.argv[1] + "/plain")
how = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/plain", quantization_config=how)
model.save_pretrained(sys.argv[1] + "/quantized")
"""
READ = """
import bitsandbytes, gc, json, sys, torch
from torchao import quantization as torchao
from transformers import BitsAndBytesConfig, TorchAoConfig
from lightning_hetero.models.huggingface import load_pretrained

def status(name):
    lines = open("/proc/self/status", encoding="ascii").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name + ":"))

bitsandbytes.nn.Params4bit(torch.randn(64, 64), quant_type="nf4").to("cpu")
how = {
    "plain nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "plain int8": BitsAndBytesConfig(load_in_8bit=True),
    "plain torchao": TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2)),
    "plain float8": TorchAoConfig(torchao.Float8WeightOnlyConfig()),
    "plain intx": TorchAoConfig(torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4)),
}.get(sys.argv[2])
folder = sys.argv[1] + "/" + sys.argv[2].partition(" ")[0]
warm = load_pretrained(folder, quantization_config=how)  # What libraries load doesn't count.
next(p for p in warm.parameters() if hasattr(p, "whole_reader")).whole_reader()
del warm
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
model = load_pretrained(folder, quantization_config=how)
weights = [
    parameter.whole_reader
    for name, parameter in model.named_parameters()
    if hasattr(parameter, "whole_reader") and name.split(".")[2] in ("0", "1")
]
held = [read() for read in weights]
own = sum(read.size.num_bytes for read in weights)
print(json.dumps({"own": own, "peak": status("VmHWM") - before, "count": len(held)}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    run(WRITE, found)
    return found


def run(script: str, *arguments: object) -> str:
    # Freed memory goes back to the system, so that it isn't counted.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**18)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    return done.stdout


EIGHT_BITS = [f"plain {name}" for name in ("int8", "torchao", "float8", "intx")]


@pytest.mark.parametrize("kind", ["quantized", "plain nf4", *EIGHT_BITS])
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_a_rank_takes_its_layers_and_no_more_than_the_largest_tensor_beside(folder, kind):
    """From a quantized folder, and where weights are quantized as they are read."""
    found = json.loads(run(READ, folder, kind).splitlines()[-1])
    largest = 4 * 4096 * 1024
    assert found["count"] == 14
    # Two of eight layers; in 8 bits a layer is twice as large as in the 4 bits of that folder.
    whole = (folder / "quantized" / "model.safetensors").stat().st_size
    assert found["own"] < whole * (2 if kind in EIGHT_BITS else 1) / 5
    assert found["peak"] <= found["own"] + largest, found
