"""Laws of recorded operations: the period of any repeating stream is found; nothing unsafe."""

import gzip
import json
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import read_times


def dump(pattern, durations_s, *, prefix=(), extra_every=0):
    """Repeat a pattern of (name, size) once per duration, spread evenly over it."""
    now_s, ops = 100.0, []
    for name, size in prefix:
        ops.append((name, size, now_s))
        now_s += 0.01
    for i, duration_s in enumerate(durations_s):
        for j, (name, size) in enumerate(pattern):
            ops.append((name, size, now_s + duration_s * 0.8 * j / len(pattern)))
        if extra_every and i % extra_every == extra_every - 1:
            ops.append(("barrier", 0, now_s + 0.9 * duration_s))
        now_s += duration_s
    entries = [
        {
            "profiling_name": f"nccl:{name}",
            "time_created_ns": start_s * 1e9,
            "input_sizes": [[size, 4]],
            "input_dtypes": ["BFloat16"],
            "process_group": ["0", "default_pg"],
        }
        for name, size, start_s in ops
    ]
    return {"version": "2.4", "entries": entries}


@pytest.fixture
def found(tmp_path):
    """Return a function that reads a dump: operations in an iteration, and iterations' times."""

    def read(data):
        path = tmp_path / "dump.json"
        path.write_text(json.dumps(data))
        times = read_times(path)
        return int(times.source.split()[0]), times.times_s

    return read


FSDP = [("all_gather", 4096)] * 6 + [("reduce_scatter", 4096)] * 6 + [("all_reduce", 8)]


def test_the_period_of_a_sharded_step_is_its_number_of_operations(found):
    times_s = [1.0 + 0.01 * (i % 3) for i in range(50)]
    num_ops, iterations_s = found(dump(FSDP, times_s))
    assert num_ops == 13
    assert iterations_s == pytest.approx(times_s[:-1], abs=0.02)


def test_long_runs_of_like_operations_do_not_look_like_period_one(found):
    pattern = [("all_gather", 64)] * 99 + [("all_reduce", 8)]
    assert found(dump(pattern, [1.0] * 20))[0] == 100


def test_start_up_operations_do_not_matter(found):
    prefix = [("broadcast", 1000 + i) for i in range(20)]
    assert found(dump(FSDP, [1.0] * 60, prefix=prefix))[0] == 13


def test_a_slow_iteration_shows_in_the_times_in_spite_of_extra_operations(found):
    times_s = [1.0] * 100
    times_s[70] = 3.0
    num_ops, iterations_s = found(dump(FSDP, times_s, extra_every=50))
    assert num_ops == 13
    assert len(iterations_s) == 99
    assert max(range(99), key=iterations_s.__getitem__) in (69, 70)
    assert max(iterations_s) > 2.0


def test_one_operation_per_iteration_has_period_one(found):
    num_ops, iterations_s = found(dump([("all_reduce", 64)], [0.5] * 30))
    assert num_ops == 1
    assert iterations_s == pytest.approx([0.5] * 29)


def test_a_stream_that_does_not_repeat_has_no_period(found):
    rng = random.Random(1)
    pattern = [(rng.choice("abcdefgh"), rng.randrange(9)) for _ in range(500)]
    for ops in (pattern, pattern[:3]):
        with pytest.raises(ConfigurationError, match="Nothing repeats"):
            found(dump(ops, [1.0]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=12).filter(lambda p: len(set(p)) > 1),
    st.integers(8, 30),
)
def test_the_shortest_repetition_is_found(tmp_path_factory, pattern, num_iterations):
    size = len(pattern)
    shortest = next(
        k for k in range(1, size + 1) if size % k == 0 and pattern == pattern[:k] * (size // k)
    )
    path = tmp_path_factory.getbasetemp() / "repeated.json"
    path.write_text(json.dumps(dump([("op", kind) for kind in pattern], [1.0] * num_iterations)))
    assert read_times(path).source.startswith(f"{shortest} operations")


def test_a_real_profiler_trace_gives_the_period(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        tensor = torch.ones(64)
        cpu = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
            for _ in range(12):
                dist.all_reduce(tensor)
                dist.all_reduce(tensor[:4])
                dist.broadcast(tensor, 0)
    finally:
        dist.destroy_process_group()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    found = read_times(tmp_path / "trace.json")
    assert found.source.startswith("3 operations")
    assert len(found.times_s) == 11


def test_flight_recorder_dumps_read_alike_in_all_formats(tmp_path):
    data = dump([("all_gather", 8), ("all_reduce", 2)], [0.02] * 10)
    (tmp_path / "dump.json").write_text(json.dumps(data))
    (tmp_path / "dump.pickle").write_bytes(pickle.dumps(data))
    (tmp_path / "dump.json.gz").write_bytes(gzip.compress(json.dumps(data).encode()))
    found = read_times(tmp_path / "dump.json")
    assert found == read_times(tmp_path / "dump.pickle") == read_times(tmp_path / "dump.json.gz")
    assert found.times_s == pytest.approx([0.02] * 9)


def test_a_pickle_that_could_run_code_is_refused(tmp_path):
    (tmp_path / "bad").write_bytes(pickle.dumps({"entries": [print]}))
    with pytest.raises(ConfigurationError, match="could run code"):
        read_times(tmp_path / "bad")
