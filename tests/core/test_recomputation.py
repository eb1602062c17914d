"""Budgets hold, and no more is computed again than they ask for."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.actions import schedule_1f1b
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.recomputation import (
    LayerBytes,
    Windows,
    fewest_recomputed,
    held_at_backward,
    peak_activation_bytes,
)

LAYER = LayerBytes(kept=16.0, recomputed=2.0)


def windows_of(stage_index: int, num_stages: int, num_microbatches: int) -> Windows:
    return held_at_backward(
        schedule_1f1b(
            stage_index=stage_index, num_stages=num_stages, num_microbatches=num_microbatches
        )
    )


def replayed_peak(
    layer: LayerBytes, num_layers: int, tokens: list[int], recomputed: tuple[int, ...], stages: int
) -> float:
    """Walk through the first of `stages` stages layer by layer, as autograd saves and frees."""
    held = peak = 0.0
    for action in schedule_1f1b(stage_index=0, num_stages=stages, num_microbatches=len(tokens)):
        m = action.microbatch_index
        sizes = [
            tokens[m] * (layer.recomputed if index < recomputed[m] else layer.kept)
            for index in range(num_layers)
        ]
        if action.kind == "F":
            held += sum(sizes)
            peak = max(peak, held)
            continue
        for index, size in reversed(list(enumerate(sizes))):
            again = tokens[m] * layer.kept - size if index < recomputed[m] else 0
            peak = max(peak, held + again)
            held -= size
    assert held == pytest.approx(0)
    return peak


@given(data=st.data())
def test_no_budget_is_exceeded_and_no_layer_more_would_fit(data):
    num_layers, num_stages = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    tokens = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=9))
    windows = windows_of(0, num_stages, len(tokens))
    least = replayed_peak(LAYER, num_layers, tokens, (num_layers,) * len(tokens), num_stages)
    most = replayed_peak(LAYER, num_layers, tokens, (0,) * len(tokens), num_stages)
    budget = least + data.draw(st.floats(0, 1.1)) * (most - least)
    found = fewest_recomputed(budget, LAYER, num_layers, tokens, windows)
    peak = replayed_peak(LAYER, num_layers, tokens, found, num_stages)
    assert peak <= budget * (1 + 1e-6)
    assert peak == pytest.approx(
        peak_activation_bytes(LAYER, num_layers, tokens, found, windows), rel=1e-6
    )
    for m in range(len(tokens)):
        if found[m]:
            more = (*found[:m], found[m] - 1, *found[m + 1 :])
            assert peak_activation_bytes(LAYER, num_layers, tokens, more, windows) > budget


@given(data=st.data())
def test_what_is_computed_again_is_near_the_least_possible(data):
    """Brute force over all choices: at most one layer of the longest more per window."""
    num_layers, num_stages = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    tokens = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    windows = windows_of(0, num_stages, len(tokens))
    choices = list(itertools.product(range(num_layers + 1), repeat=len(tokens)))
    peaks = {
        choice: peak_activation_bytes(LAYER, num_layers, tokens, choice, windows)
        for choice in choices
    }
    low, high = min(peaks.values()), max(peaks.values())
    budget = low + data.draw(st.floats(0, 1)) * (high - low)
    found = fewest_recomputed(budget, LAYER, num_layers, tokens, windows)

    def work(choice: tuple[int, ...]) -> int:
        return sum(count * t for count, t in zip(choice, tokens, strict=True))

    least = min(work(choice) for choice in choices if peaks[choice] <= budget)
    num_windows = -(-len(tokens) // num_stages)
    assert work(found) <= least + num_windows * max(tokens)


def test_a_budget_without_room_for_one_recomputed_layer_says_what_it_takes():
    windows = windows_of(0, 2, 4)
    tokens = [1000, 3000, 1000, 1000]
    needed = peak_activation_bytes(LAYER, 3, tokens, (3,) * 4, windows)
    assert needed == 4000 * 3 * 2.0 + 3000 * 14.0
    with pytest.raises(PlanError, match=r"not even one recomputed layer.*3,000 tokens.*66,001"):
        fewest_recomputed(needed - 1, LAYER, 3, tokens, windows)
    assert fewest_recomputed(needed, LAYER, 3, tokens, windows) == (0, 3, 3, 1)
