"""Modules and plans drawn at random: each is equal to plain Lightning, or refused at once."""

import os
import time

import pytest

from tests.fuzz.judge import DEFECT, EQUAL, IMPOSSIBLE, REFUSED, judge
from tests.fuzz.recipes import draw
from tests.processes import ProcessPool

SECONDS = float(os.environ.get("FUZZ_SECONDS", "30"))
"""`make fuzz` takes five minutes, of other cases."""
FEWEST = 12


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 570)
def test_each_case_equals_plain_lightning_or_is_refused_at_the_first_step(
    pool: ProcessPool,
) -> None:
    verdicts = []
    end_s = time.monotonic() + SECONDS
    while time.monotonic() < end_s or len(verdicts) < FEWEST:
        verdicts.append(judge(pool, draw(len(verdicts))))
    defects = [f"{item.recipe}: {item.told}" for item in verdicts if item.kind == DEFECT]
    assert not defects, "\n".join(defects)
    assert {item.kind for item in verdicts} - {IMPOSSIBLE} == {EQUAL, REFUSED}
