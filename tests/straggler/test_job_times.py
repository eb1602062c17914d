"""Laws of what is read of any job: each kind of file gives its iterations, changes are found."""

import gzip
import json
import math
import pickle
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetero.cli import main
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import find_changes, read_times

NUM_STEPS, SLOW_FROM, SLOW_TO = 150, 60, 100
SIZES = (4096, 1024, 1024, 512)


def times():
    rng = random.Random(0)
    return [
        rng.gauss(1.0, 0.02) * (1.8 if SLOW_FROM <= step < SLOW_TO else 1.0)
        for step in range(NUM_STEPS)
    ]


def ops():
    """Yield (name, size, start) of the operations of all iterations."""
    start = 0.0
    for time_s in times():
        for index, size in enumerate(SIZES):
            yield "all_reduce" if index else "all_gather", size, start + 0.2 * index * time_s
        start += time_s


def write(path, kind):
    if kind == "list":
        path.write_text("\n".join(map(str, times())))
    elif kind == "csv":
        path.write_text("step,seconds\n" + "\n".join(f"{i},{t}" for i, t in enumerate(times())))
    elif kind in ("trace", "zipped trace"):
        events = [
            {
                "ph": "X",
                "name": f"nccl:{name}",
                "ts": start * 1e6,
                "dur": 1.0,
                "args": {"In msg nelems": size, "dtype": "Float"},
            }
            for name, size, start in ops()
        ]
        text = json.dumps({"traceEvents": events}).encode()
        path.write_bytes(gzip.compress(text) if kind == "zipped trace" else text)
    else:
        entries = [
            {
                "profiling_name": f"nccl:{name}",
                "time_created_ns": int(start * 1e9),
                "input_sizes": [[size]],
                "input_dtypes": ["Float"],
                "process_group": ["0", "default"],
            }
            for name, size, start in ops()
        ]
        data = {"version": "2.10", "entries": entries}
        pickled = kind.startswith("pickled")
        path.write_bytes(pickle.dumps(data) if pickled else json.dumps(data).encode())


KINDS = [
    "list",
    "csv",
    "trace",
    "zipped trace",
    "flight recorder",
    "pickled flight recorder",
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_iterations_and_their_changes(kind, tmp_path, capsys):
    path = tmp_path / "file"
    write(path, kind)
    found = read_times(path)
    assert len(found.times_s) >= NUM_STEPS - 1
    assert found.times_s[-40:] == pytest.approx(times()[: len(found.times_s) + 1][-40:], rel=0.2)
    assert main(["stragglers", str(path)]) == 0
    output = capsys.readouterr().out
    assert f"Found {found.source}." in output
    rows = [line.split() for line in output.splitlines() if "since step" in line]
    assert [row[1] for row in rows] == ["slowdown", "recovery"]
    for row, true in zip(rows, (SLOW_FROM, SLOW_TO), strict=True):
        assert 0 <= int(row[0]) - true <= 10
    if "operations" in found.source:
        assert found.source.startswith("4 operations an iteration")


def test_several_files_are_ranks(tmp_path, capsys):
    files = [tmp_path / f"rank{rank}.jsonl" for rank in (0, 1)]
    for path in files:
        write(path, "list")
    assert main(["stragglers", *map(str, files)]) == 0
    output = capsys.readouterr().out
    assert output.count("slowdown") == 2
    assert f"{files[1]}:" in output


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
        b"{}",
        b"\x80\x04",
        b"\x80\x05garbage.",
        b"\x1f\x8b1234",
        b"[" * 100_000,
        b"\xff\xfe\x00",
        b"{",
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
