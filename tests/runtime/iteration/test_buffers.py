"""Buffers that steps change are those of a single device, or refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.processes import ProcessPool
from tests.runtime.buffer_runs import COPIES, TURNED, TWO, TWO_OF_ONE, BufferCase, keep

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("keeps", ["counts", "unversioned", "mean", "norms", "cache"])
def test_buffers_are_those_of_a_single_device_whoever_computes_their_layer(
    pool: ProcessPool, tmp_path: Path, keeps: str
) -> None:
    expected: Any = pool.run(keep, 1, BufferCase(keeps=keeps), tmp_path)[0]
    plans = [(TWO_OF_ONE,), (TWO_OF_ONE, TURNED)]
    plans += [(COPIES,)] if keeps in ("counts", "unversioned", "cache") else []
    plans += [(TWO,)] if keeps == "cache" else []
    for item in plans:
        for found in pool.run(keep, 2, BufferCase(keeps=keeps, plans=item), tmp_path):
            assert isinstance(found, dict), found
            assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
            assert found["validated"] == pytest.approx(expected["validated"], rel=1e-4)
            for name, value in expected["buffers"].items():
                assert found["buffers"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
                if name in found["saved"]:
                    assert found["saved"][name] == found["buffers"][name], name


def test_buffers_that_follow_what_a_micro_batch_holds_are_refused_or_accepted_on_every_rank(
    pool: ProcessPool, tmp_path: Path
) -> None:
    for keeps, plan in (
        ("counts", TWO),
        ("norms", TWO),
        ("mean", COPIES),
        ("norms", COPIES),
        ("scratch counts", TWO),
        ("frequencies", TWO),
        ("frequencies", COPIES),
    ):
        for message in pool.run(keep, 2, BufferCase(keeps=keeps, plans=(plan,)), tmp_path):
            assert "layers." in message or "that of its halves put together" in message
            assert "allow_mixing=True" in message
    case = BufferCase(keeps="norms", plans=(COPIES,), allow_mixing=True)
    first, second = pool.run(keep, 2, case, tmp_path)
    assert first["buffers"] == second["buffers"]
    assert first["saved"] == {name: first["buffers"][name] for name in first["saved"]}
    assert first["validated"] == second["validated"]
