"""Laws of measured profiles on the CPU; none of them depends on how fast this machine is."""

import dataclasses

import pytest
import torch

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.profile import Profile
from lightning_hetero.runtime.setup.profiling import (
    ProfileOptions,
    current_versions,
    measure_profile,
)

TINY = ModelSpec(
    name="tiny",
    num_layers=6,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=64,
    vocab_size=96,
    gated_mlp=True,
    tied_embeddings=False,
)


def measure(model=TINY, **options) -> Profile:
    options = {"microbatches": ((16,), (24, 8)), "num_repeats": 1} | options
    return measure_profile(
        model, ProfileOptions(**options), device_name="cpu-core", device=torch.device("cpu")
    )


def test_every_degree_microbatch_and_power_of_two_is_measured(tmp_path):
    lines: list[str] = []
    options = ProfileOptions(
        microbatches=((16,), (24, 8)), tp_degrees=(1, 2), max_block=7, num_repeats=1
    )
    profile = measure_profile(
        TINY,
        options,
        device_name="cpu-core",
        device=torch.device("cpu"),
        report=lines.append,
    )
    (device,) = profile.devices
    assert {(t.tp_degree, t.lengths) for t in device.times} == {
        (tp, lengths) for tp in (1, 2) for lengths in ((16,), (24, 8))
    }
    assert all(set(t.blocks) == {1, 2, 4} for t in device.times)
    assert all(min(*t.blocks[1], *t.head, *t.embedding) > 0 for t in device.times)
    assert device.step_s_per_param > 0
    assert len(lines) == 2 * 3 + 1
    profile.save(tmp_path / "p.json")
    Profile.load(tmp_path / "p.json").check(model=TINY, versions=current_versions())


def test_memory_is_what_autograd_keeps_and_shrinks_with_the_tp_degree():
    memory = measure(tp_degrees=(1, 2)).devices[0].memory
    # Both norms keep their input in fp32; what a TP rank computes inside is cut in half.
    outside = 2 * 32 * 4
    assert memory[0].layer_bytes_per_token > 4 * outside
    assert outside < memory[1].layer_bytes_per_token < memory[0].layer_bytes_per_token
    short, long = (measure(microbatches=((n,),)).devices[0].memory[0] for n in (64, 256))
    assert short.layer_bytes_per_token == pytest.approx(long.layer_bytes_per_token, rel=0.05)
    # At least the logits and their softmax in fp32.
    assert memory[0].head_bytes_per_token > 96 * 4
    assert memory[1].head_bytes_per_token < memory[0].head_bytes_per_token


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (TINY, {"tp_degrees": (3,)}, "4 heads"),
        (dataclasses.replace(TINY, intermediate_size=65), {"tp_degrees": (2,)}, "intermediate"),
        (dataclasses.replace(TINY, head_dim=16), {}, "hidden_size"),
        (TINY, {"microbatches": ()}, "No micro-batch"),
        (TINY, {"tp_degrees": ()}, "1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, options, message):
    with pytest.raises(ProfileError, match=message):
        measure(model, **options)
