import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.core.profile import TimeFit


@given(st.floats(0, 1e-6), st.floats(1e-6, 1e-3), st.floats(0, 1.0), st.integers(0, 2**32 - 1))
def test_fit_finds_the_coefficients_that_made_the_samples(a, b, c, seed):
    rng = np.random.default_rng(seed)
    batches = [tuple(map(int, rng.integers(1, 4096, size=k))) for k in (1, 1, 2, 3, 4, 5)]
    exact = TimeFit(a=a, b=b, c=c)
    fitted = TimeFit.of([(lengths, exact(lengths)) for lengths in batches])
    for lengths in batches:
        assert fitted(lengths) == pytest.approx(exact(lengths), rel=1e-3)


@given(st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=6))
def test_fit_never_has_negative_coefficients(seconds):
    samples = [((64 * (i + 1),), value) for i, value in enumerate(seconds)]
    fitted = TimeFit.of(samples)
    assert min(fitted.a, fitted.b, fitted.c) >= 0
    assert fitted((10_000,)) > 0


def test_one_length_says_nothing_about_the_square():
    fitted = TimeFit.of([((512,) * n, 0.01 * n) for n in (1, 2, 4)])
    assert fitted.a == 0
    assert fitted((512,) * 8) == pytest.approx(0.08)
