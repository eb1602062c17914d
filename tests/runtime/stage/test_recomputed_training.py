"""Computing again changes no bit of training, and a stage's activations stay in its budget."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.profiling import ProfileOptions, measure_profile
from lightning_hetero.runtime.setup.sizes import infer_model_spec
from tests.fits import Case, assert_same_bits, fit
from tests.plans import pipeline, plan_of, stage
from tests.processes import ProcessPool
from tests.runtime.case_modules import PackedModule, PackedSamples
from tests.runtime.recomputation_runs import refused_budget, train_counted, train_watched

pytestmark = pytest.mark.dist


def test_recomputation_changes_no_bit_of_training_with_dropout(pool: ProcessPool) -> None:
    """Drawn numbers too: the module masks tokens in its step and drops out inside its layers."""

    def case(first: dict[str, int], second: dict[str, int], whole: dict[str, int]) -> Case:
        plan = plan_of(
            pipeline(stage(2, 0, 3) | first, stage(0, 3, 4) | second, num_microbatches=3),
            pipeline(stage(1, 0, 4) | whole, num_microbatches=1),
        )
        return Case(
            plan=plan, world_size=3, model="masking", num_layers=4, batch_size=4, num_rows=24
        )

    budget = {"activation_budget_bytes": 30_000}
    plain = pool.run(fit, 3, case({}, {}, {}))
    selective = {"recomputed_layers": 1, "selective_layers": 2}
    fixed = case(selective, {"recomputed_layers": 1}, {"selective_layers": 3})
    assert_same_bits(pool.run(fit, 3, fixed), plain)
    within = case(budget, {"recomputed_layers": 0}, {"activation_budget_bytes": 60_000})
    assert_same_bits(pool.run(fit, 3, within), plain)
    for option in ({"activation_budget_bytes": 60_000}, {"activation_checkpointing": 2}):
        everywhere = replace(case({}, {}, {}), options=option)
        assert_same_bits(pool.run(fit, 3, everywhere), plain)


def test_layers_of_several_ranks_keep_as_many_bytes_as_their_profile_says(
    pool: ProcessPool,
) -> None:
    def case(**how: int) -> Case:
        plan = plan_of(pipeline(stage([2, 0], 0, 2) | how, stage(1, 2, 3), num_microbatches=2))
        return Case(plan=plan, world_size=3, model="packed", width=32, batch_size=4)

    cases = [case(), case(selective_layers=2), case(recomputed_layers=2)]
    cut = [replace(item, options={"sequence_parallel": True}) for item in cases[:2]]
    found = pool.run(train_counted, 3, [*cases, *cut])
    for index, first in ((1, 0), (2, 0), (4, 3)):
        assert_same_bits(
            [row[index].outcome for row in found], [row[first].outcome for row in found]
        )
    module = PackedModule(cases[0])
    spec = infer_model_spec(module, ModelLayout.of(module))
    assert spec is not None
    options = ProfileOptions(microbatches=((8, 30),), tp_degrees=(2,), max_block=1, num_repeats=1)
    profile = measure_profile(spec, options, device_name="cpu", device=torch.device("cpu"))
    (memory,) = profile.devices[0].memory
    of_input, products = memory.recomputed_bytes_per_token, memory.products_bytes_per_token
    assert of_input is not None
    assert products is not None
    assert of_input + products < 0.7 * memory.layer_bytes_per_token
    # What keeps products keeps them out of autograd's sight.
    expected = [memory.layer_bytes_per_token, of_input, of_input]
    tokens = 2 * sum(map(len, PackedSamples(cases[0].num_rows).rows))
    for rank in (0, 2):
        kept, selective, whole, *_ = found[rank]
        for run, num_bytes in zip((kept, selective, whole), expected, strict=True):
            assert run.saved_bytes == pytest.approx(num_bytes * tokens, rel=0.05)
        # Of two sums of each layer and micro-batch, the one behind attention is done again.
        num_passes = 2 * 2 * kept.outcome.num_steps
        assert selective.num_sums - kept.num_sums == num_passes


def packed(**first: Any) -> Case:
    """Six micro-batches of two samples each, of 4 to 58 tokens, through two stages."""
    plan = plan_of(pipeline(stage(0, 0, 4) | first, stage(1, 4, 5), num_microbatches=6))
    return Case(
        plan=plan, world_size=2, model="packed", num_layers=5, batch_size=12, num_rows=48, width=32
    )


def test_live_activations_never_exceed_the_budget_in_a_real_run(pool: ProcessPool) -> None:
    cases = [packed(), packed(recomputed_layers=4), packed(recomputed_layers=2)]
    kept, again, half = pool.run(train_watched, 2, cases)[0]
    # Four micro-batches' worth of layers in 6 × 4 forward passes.
    assert [run.num_forwards[-1] for run in (kept, again, half)] == [24, 48, 36]
    assert [run.num_forwards[0] for run in (kept, again)] == [24, 48]
    most, least = max(kept.peaks), max(again.peaks)
    assert least < max(half.peaks) < most
    for share in (0.02, 0.4):
        budget = int(least + share * (most - least))
        found = pool.run(train_watched, 2, [packed(activation_budget_bytes=budget)])[0][0]
        assert max(found.peaks) <= budget
        assert found.num_forwards[0] == 47, "the first iteration counts one layer"
        assert 24 < found.num_forwards[-1] < 48
        assert_same_bits([found.outcome], [kept.outcome])
    # A little room goes to short micro-batches, more than half of it takes half of the layers.
    assert found.num_forwards[-1] < 40


def test_a_budget_that_holds_no_recomputed_layer_is_refused_in_the_first_step(
    pool: ProcessPool,
) -> None:
    for told, num_steps in pool.run(refused_budget, 2, packed(activation_budget_bytes=20_000)):
        assert num_steps == 0
        for words in ("holds not even one recomputed layer", "activation_budget_bytes to"):
            assert words in told
        assert "ranks [0]" in told
