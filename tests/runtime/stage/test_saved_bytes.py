"""What a layer keeps, counted once, tells what any other micro-batch and recomputation keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.core.recomputation import LayerBytes
from lightning_hetero.models import LMConfig, pack_samples
from lightning_hetero.models.huggingface import use_packed_attention
from lightning_hetero.runtime.setup.products import KeptProducts
from lightning_hetero.runtime.setup.profiling import ModelShard, ProfileOptions, measure_profile
from lightning_hetero.runtime.stage.boundary import StageBoundary
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass
from lightning_hetero.runtime.stage.recomputation import MeasuredLayer, Recomputation
from tests.capped_memory import MemoryCounter
from tests.runtime.huggingface_runs import make_model
from tests.runtime.recomputation_runs import counting_layers

NUM_LAYERS = 4


def run_pass(layers: nn.ModuleList, step: Callable[[], Any], again: Recomputation) -> int:
    """Run a step forward and return the bytes that autograd saves inside of its layers."""
    boundary = StageBoundary(list(layers))
    whole = MicrobatchPass(
        layers=range(NUM_LAYERS),
        num_layers=NUM_LAYERS,
        seed=(1,),
        receive=None,
        wait_unit=lambda index: None,
        recomputation=again,
    )
    with counting_layers() as totals:
        output = boundary.run_step(whole, lambda _: step(), None)
    boundary.remove()
    del output
    return sum(totals)


def count_layer(layers: nn.ModuleList, step: Callable[[], Any], num_tokens: int) -> LayerBytes:
    """Return what the runtime counts of the last layer while it trains."""
    found: list[LayerBytes] = []
    last = MeasuredLayer(index=NUM_LAYERS - 1, num_tokens=num_tokens, report=found.append)
    again = Recomputation(layers=range(NUM_LAYERS - 1), measured=last)
    run_pass(layers, step, again)
    return found[0]


def samples(lengths: tuple[int, ...]) -> list[Tensor]:
    return [torch.randint(3, 29, (length,)) for length in lengths]


def test_a_profile_says_what_selective_recomputation_keeps() -> None:
    config = LMConfig(
        vocab_size=29, hidden_size=64, num_layers=4, num_heads=4, intermediate_size=172
    )
    options = ProfileOptions(microbatches=((30,), (8, 30)), max_block=1, num_repeats=1)
    cpu = torch.device("cpu")
    profile = measure_profile(config.spec, options, device_name="cpu", device=cpu)
    (expected,) = [item.products_bytes_per_token for item in profile.devices[0].memory]
    shard, products = ModelShard(config.spec, 1, 1, cpu), KeptProducts()
    token_ids, extra = shard.batch((40, 9, 23))
    hidden = shard.hidden(len(token_ids))
    for _ in range(2):  # From the first backward on only what it needs is kept.
        with MemoryCounter(2**40) as counter:
            before = counter.live_bytes
            output = products(shard.model.layers[0], hidden, *extra)
            kept = counter.live_bytes - before - output.nbytes
        output.sum().backward()
        del output
    assert kept == pytest.approx(expected * len(token_ids), rel=0.05)


@pytest.mark.parametrize("kind", ["packed", "padded"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_one_micro_batch_of_a_hugging_face_model_predicts_others_within_10_percent(
    name: str, kind: str
) -> None:
    sizes = {"n_embd": 64} if name == "gpt2" else {"hidden_size": 64, "intermediate_size": 128}
    model = make_model(name, **sizes).train()
    layers = model.transformer.h if name == "gpt2" else model.model.layers
    if kind == "packed":
        use_packed_attention(model)

    def step_of(lengths: tuple[int, ...]) -> Callable[[], Any]:
        if kind == "packed":
            batch = pack_samples(samples(lengths))
            return lambda: model(**batch).logits
        rows = nn.utils.rnn.pad_sequence(samples(lengths), batch_first=True)
        mask = (rows > 0).long()
        return lambda: model(input_ids=rows, attention_mask=mask).logits

    def tokens(lengths: tuple[int, ...]) -> int:
        return sum(lengths) if kind == "packed" else max(lengths) * len(lengths)

    first, second = (12, 20), (30, 25, 7, 18)
    layer = count_layer(layers, step_of(first), tokens(first))
    step = step_of(second)
    for recomputed in range(NUM_LAYERS + 1):
        kept = (NUM_LAYERS - recomputed) * layer.kept + recomputed * layer.recomputed
        counted = run_pass(layers, step, Recomputation(layers=range(recomputed)))
        assert counted == pytest.approx(kept * tokens(second), rel=0.1), recomputed
