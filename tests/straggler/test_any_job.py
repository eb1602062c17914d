"""Laws of what is read of any job: each kind of file gives its iterations, nothing unsafe."""

import gzip
import json
import math
import pickle
import random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.cli import main
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import find_changes, read_times

NUM_STEPS, SLOW_FROM, SLOW_TO = 150, 60, 100
PATTERN = [("all_gather", 4096), ("all_reduce", 1024), ("all_reduce", 1024), ("all_reduce", 512)]
FSDP = [("all_gather", 4096)] * 6 + [("reduce_scatter", 4096)] * 6 + [("all_reduce", 8)]


def times():
    rng = random.Random(0)
    return [
        rng.gauss(1.0, 0.02) * (1.8 if SLOW_FROM <= step < SLOW_TO else 1.0)
        for step in range(NUM_STEPS)
    ]


def operations(pattern, times_s, *, num_before=0, extra_every=0):
    """Return (name, size, start): a pattern in each iteration, operations before and in between."""
    ops = [("broadcast", 1000 + i, i * 0.01) for i in range(num_before)]
    now_s = 100.0
    for i, time_s in enumerate(times_s):
        for j, (name, size) in enumerate(pattern):
            ops.append((name, size, now_s + time_s * 0.8 * j / len(pattern)))
        if extra_every and i % extra_every == extra_every - 1:
            ops.append(("barrier", 0, now_s + 0.9 * time_s))
        now_s += time_s
    return ops


def dump(ops):
    """Return a flight recorder's dump."""
    entries = [
        {
            "profiling_name": f"nccl:{name}",
            "time_created_ns": int(start_s * 1e9),
            "input_sizes": [[size, 4]],
            "input_dtypes": ["BFloat16"],
            "process_group": ["0", "default_pg"],
        }
        for name, size, start_s in ops
    ]
    return {"version": "2.4", "entries": entries}


def trace(ops):
    """Return a profiler's trace."""
    events = [
        {
            "ph": "X",
            "name": f"nccl:{name}",
            "ts": start_s * 1e6,
            "dur": 1.0,
            "args": {"In msg nelems": size, "dtype": "Float"},
        }
        for name, size, start_s in ops
    ]
    return {"traceEvents": events}


def as_json(data):
    return json.dumps(data).encode()


OPS = operations(PATTERN, times())
FILES = {
    "list": "\n".join(map(str, times())).encode(),
    "csv": ("step,seconds\n" + "\n".join(f"{i},{t}" for i, t in enumerate(times()))).encode(),
    "trace": as_json(trace(OPS)),
    "zipped trace": gzip.compress(as_json(trace(OPS))),
    "dump": as_json(dump(OPS)),
    "zipped dump": gzip.compress(as_json(dump(OPS))),
    "pickled dump": pickle.dumps(dump(OPS)),
}


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_gives_the_iterations_and_their_changes(kind, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_bytes(FILES[kind])
    found = read_times(path)
    assert len(found.times_s) >= NUM_STEPS - 1
    assert found.times_s == pytest.approx(times()[: len(found.times_s)], rel=1e-3)
    assert ("operations" in found.source) == (kind not in ("list", "csv"))
    # Several files are ranks.
    assert main(["stragglers", str(path), str(path)]) == 0
    output = capsys.readouterr().out
    assert output.count(f"{path}:\nFound {found.source}.") == 2
    rows = [line.split() for line in output.splitlines() if "since step" in line]
    assert [row[1] for row in rows] == ["slowdown", "recovery"] * 2
    for row, true in zip(rows, (SLOW_FROM, SLOW_TO) * 2, strict=True):
        assert 0 <= int(row[0]) - true <= 10


@pytest.mark.parametrize(
    ("pattern", "options", "period"),
    [
        (FSDP, {}, 13),
        (FSDP, {"num_before": 20}, 13),
        (FSDP, {"extra_every": 50}, 13),
        ([("all_gather", 64)] * 99 + [("all_reduce", 8)], {}, 100),
        ([("all_reduce", 64)], {}, 1),
    ],
)
def test_an_iteration_is_what_repeats_whatever_comes_in_between(tmp_path, pattern, options, period):
    times_s = [1.0] * 100
    times_s[70] = 3.0
    (tmp_path / "dump").write_bytes(as_json(dump(operations(pattern, times_s, **options))))
    found = read_times(tmp_path / "dump")
    assert found.source.startswith(f"{period} operations")
    assert len(found.times_s) >= 99
    assert max(found.times_s) > 2.0
    assert max(range(99), key=found.times_s.__getitem__) in (69, 70)


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
    ops = operations([("op", kind) for kind in pattern], [1.0] * num_iterations)
    path.write_bytes(as_json(dump(ops)))
    assert read_times(path).source.startswith(f"{shortest} operations")


def test_a_stream_that_does_not_repeat_has_no_period(tmp_path):
    rng = random.Random(1)
    pattern = [(rng.choice("abcdefgh"), rng.randrange(9)) for _ in range(500)]
    for part in (pattern, pattern[:3]):
        (tmp_path / "dump").write_bytes(as_json(dump(operations(part, [1.0]))))
        with pytest.raises(ConfigurationError, match="Nothing repeats"):
            read_times(tmp_path / "dump")


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


def test_a_list_of_equal_times_has_no_change():
    assert len(find_changes([1.0] * 100)) == 100


@pytest.mark.parametrize(
    "content",
    [
        b"hello\nworld\n",
        b"1.0\ntwo\n",
        b"1.0\n",
        b"1\n-2\n",
        b"1\nnan\n",
        b"[1, true]",
        b"[]",
        b"{",
        b"{}",
        b"\x80\x04",
        b"\x80\x05garbage.",
        pickle.dumps({"entries": [print]}),  # It could run code.
        b"\x1f\x8b1234",
        b"[" * 100_000,
        b"\xff\xfe\x00",
        b'{"traceEvents": [{"ph": "X", "name": "nccl:x", "ts": 1e999}]}',
        b'{"traceEvents": [{"ph": "X", "name": "nccl:x", "ts": 1, "args": 3}]}',
        b'{"entries": [{"profiling_name": "x", "time_created_ns": null}]}',
        b'{"entries": [null]}',
        b'{"op": 3}\n',
        b'{"entries": []}',
    ],
)
def test_what_holds_no_iterations_is_one_line_and_exit_code_2(content, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert main(["stragglers", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert len(error) < 700
    assert ("could run code" in error) == (b"print" in content)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=60) | st.text(st.sampled_from('{}[]:,"0159e.- \n'), max_size=60))
def test_any_bytes_are_read_or_refused_in_our_words(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any-bytes"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        found = read_times(path).times_s
    except ConfigurationError:
        found = (1.0,)
    assert all(math.isfinite(time_s) for time_s in found)
