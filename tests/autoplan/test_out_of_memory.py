"""A run out of memory says what filled the device, and the next start plans with it."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetero.autoplan import AutoPlan
from lightning_hetero.autoplan.out_of_memory import (
    OutOfMemory,
    _resident_bytes,
    is_out_of_memory,
    requested_bytes,
)
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.runtime.setup.profile_cache import CorrectionFile
from lightning_hetero.simulator import (
    MemoryCorrection,
    MemoryTerms,
    RooflineCost,
    StageShape,
    StateLayout,
    usable_bytes,
)
from tests.autoplan import restarted
from tests.autoplan.autoplan_runs import Planned, fail_in, train
from tests.processes import ProcessFailed, ProcessPool, free_port
from tests.scripts import run_python


def train_capped(pool: ProcessPool, caps: tuple[float, float], cache: Path) -> list[Planned]:
    options = AutoPlan(microbatch_sizes=(1,))
    return pool.run(train, 2, options, (1.0, 1.0), 6, str(cache), 64, caps)


@pytest.mark.dist
def test_every_rank_is_told_which_stage_was_full_and_the_next_start_avoids_that(
    pool: ProcessPool, tmp_path: Path
) -> None:
    caps = (2**40, 1.9e6)
    with pytest.raises(ProcessFailed) as failed:
        train_capped(pool, caps, tmp_path)
    (path,) = tmp_path.glob("memory-*.json")
    for text in failed.value.failures.values():
        assert "Tried to allocate" in text
        assert text.count("Stage 0 of pipeline 1 (rank 1, cpu") == 1
        for term in ("weights ", "gradients ", "owned states ", "activations ", "all but states "):
            assert f"\n{term}" in text
        assert f"({path};" in text
    assert json.loads(path.read_text())["usable_bytes"] < caps[1]
    again = train_capped(pool, caps, tmp_path)
    assert len(again[0].plan["pipelines"]) == 1, "rank 1 can't hold the whole model"
    assert len(again[0].losses) == 2


@pytest.mark.dist
@pytest.mark.parametrize("where", ["hook", "validation"])
def test_an_error_outside_of_training_steps_says_and_teaches_as_much(
    pool: ProcessPool, tmp_path: Path, where: str
) -> None:
    for text in pool.run(fail_in, 2, where, str(tmp_path)):
        assert "Tried to allocate 16777216 bytes" in text
        assert text.count("Stage 0 of pipeline 1 (rank 1, cpu") == 1
        assert "\nactivations " in text
    (path,) = tmp_path.glob("memory-*.json")
    assert json.loads(path.read_text())["usable_bytes"] < 8e6


@pytest.mark.dist
def test_a_model_that_fits_nowhere_by_what_is_known_is_refused(
    pool: ProcessPool, tmp_path: Path
) -> None:
    caps = (900_000.0, 900_000.0)
    for reason in ("is out of memory", "PlanningError"):
        with pytest.raises(ProcessFailed) as failed:
            train_capped(pool, caps, tmp_path)
        assert all(reason in text for text in failed.value.failures.values())


@pytest.mark.dist
@pytest.mark.filterwarnings("ignore")  # Lightning's, of the plain run.
def test_what_ran_out_of_memory_under_torchrun_goes_on_under_a_plan_that_fits(
    tmp_path: Path,
) -> None:
    code, output = run_python(
        [
            "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=5",
            f"--master-port={free_port()}", "--monitor-interval=0.1", restarted.__file__,
            tmp_path, str(3.8e6),
        ],
        folder=tmp_path,
        PYTHONPATH=str(Path(__file__).parents[2]),
        LIGHTNING_HETERO_CACHE=str(tmp_path / "cache"),
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip
    assert code == 0, output
    entries = [json.loads(line) for line in (tmp_path / "rank0.jsonl").read_text().splitlines()]
    starts = [entry for entry in entries if "plan" in entry]
    assert starts[0]["plan"] != starts[-1]["plan"]
    assert starts[0]["begin"] < starts[-1]["begin"], "it goes on from the checkpoint"
    (correction,) = (tmp_path / "cache").glob("memory-*.json")
    assert json.loads(correction.read_text())["activation_factor"] > 1
    steps = {entry["step"]: entry["loss"] for entry in entries if "step" in entry}
    assert [steps[step] for step in (1, 2, 3)] == pytest.approx(restarted.plain_losses())


def test_errors_of_memory_are_known_with_what_they_asked_for() -> None:
    with pytest.raises(RuntimeError) as on_cpu:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(on_cpu.value)
    assert requested_bytes(on_cpu.value) == 2**60
    on_cuda = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")
    assert is_out_of_memory(on_cuda)
    assert requested_bytes(on_cuda) == 3 * 2**29
    assert is_out_of_memory(MemoryError())
    assert requested_bytes(MemoryError()) == 0
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize("page_bytes", [4096, 65536])
def test_resident_bytes_count_pages_of_the_system_s_size(
    monkeypatch: pytest.MonkeyPatch, page_bytes: int
) -> None:
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": page_bytes}.__getitem__)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "900 70 50 1 0 60 0")
    assert _resident_bytes() == 70 * page_bytes


def test_corrections_are_joined_and_broken_or_old_ones_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_HETERO_CACHE", str(tmp_path / "new"))
    specs = [ParameterSpec(name="weight", shape=(4, 2), layer=0)]
    file = CorrectionFile.of(specs, 2, "A10-24GB")
    assert file.read() == MemoryCorrection()
    file.add(MemoryCorrection(activation_factor=1.5, usable_bytes=70))
    file.add(MemoryCorrection(activation_factor=1.2, usable_bytes=60))
    both = MemoryCorrection(activation_factor=1.5, usable_bytes=60)
    assert file.read() == both
    for other in (
        CorrectionFile.of(specs, 4, "A10-24GB"),
        CorrectionFile.of(specs, 2, "L4-24GB"),
        CorrectionFile.of([], 2, "A10-24GB"),
    ):
        assert other.read() == MemoryCorrection()
    os.utime(file.path, (0, 0))
    assert file.read() == MemoryCorrection()
    file.path.write_text('{"activation_factor": 0.1}')
    assert file.read() == MemoryCorrection()


BYTES = st.integers(1, 10**12)


@given(
    terms=st.tuples(*[BYTES] * 8),
    live=BYTES,
    requested=st.integers(0, 10**11),
    states=st.floats(0, 1),
    memory=BYTES,
    in_flight=st.floats(0.01, 1),
    known=st.floats(1, 3),
)
def test_what_failed_exceeds_the_device_as_it_is_corrected(
    terms, live, requested, states, memory, in_flight, known
):
    predicted = MemoryTerms(*map(float, terms))
    found = OutOfMemory(
        predicted=predicted,
        live_bytes=live,
        requested_bytes=requested,
        state_bytes=int(states * live),
        usable_bytes=usable_bytes(memory),
        in_flight=in_flight,
    ).correct(MemoryCorrection(activation_factor=known))
    factor = found.activation_factor / known
    passing = sum(predicted[3:7])
    corrected = predicted.states + max(predicted.total - predicted.states, factor * passing)
    assert factor >= 1
    assert corrected > usable_bytes(found.corrected_bytes(memory))
    assert found.usable_bytes is None or found.usable_bytes <= live


@pytest.mark.parametrize("recomputed", [0, 2])
def test_costs_count_with_it(recomputed):
    cluster = Cluster(nodes=(Node(device="A100-80GB", count=2),))
    model = ModelSpec.load("llama-7b")
    plain, corrected = (
        RooflineCost(cluster, model, layout=StateLayout(activation_factor=factor))
        for factor in (1.0, 1.5)
    )
    shape = StageShape("A100-80GB", 1, 4, has_head=True, recomputed_layers=recomputed)
    batches = [(4096,)] * 3
    before, after = (cost.stage_memory(shape, 2, batches, 2) for cost in (plain, corrected))
    assert after[:3] == before[:3], "states are what they are"
    for name in ("activations", "recomputed", "head", "messages"):
        assert getattr(after, name) == pytest.approx(1.5 * getattr(before, name)), name
