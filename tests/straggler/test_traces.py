"""Laws of trace readers: a real profiler trace, dumps in both formats, nothing unsafe."""

import gzip
import json
import pickle

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import infer_period, read_flight_recorder, read_profiler_trace
from lightning_hetero.straggler.recording import CommunicationRecorder


@pytest.fixture
def one_process(tmp_path):
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def step(tensor):
    dist.all_reduce(tensor)
    dist.all_reduce(tensor[:4])
    dist.broadcast(tensor, 0)


def test_a_real_profiler_trace_gives_the_period(one_process, tmp_path):
    tensor = torch.ones(64)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as profile:
        for _ in range(12):
            step(tensor)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    ops = read_profiler_trace(tmp_path / "trace.json")
    assert len(ops) == 36
    assert infer_period(ops).num_ops == 3


def test_the_recorder_sees_public_functions_once_each(one_process):
    tensor = torch.ones(64)
    original = dist.all_reduce
    with CommunicationRecorder() as recorder:
        for _ in range(10):
            step(tensor)
        with pytest.raises(ConfigurationError), CommunicationRecorder():
            pass
    assert dist.all_reduce is original
    ops = recorder.take()
    assert [op.name for op in ops[:3]] == ["all_reduce", "all_reduce", "broadcast"]
    assert [op.num_bytes for op in ops[:3]] == [256, 16, 256]
    period = infer_period(ops)
    assert period.num_ops == 3
    assert len(period.iteration_times_s) == 9


def dump():
    entries = [
        {
            "profiling_name": name,
            "time_created_ns": 10**9 + i * 10**7,
            "input_sizes": [[size, 4]],
            "input_dtypes": ["BFloat16"],
            "process_group": ["0", "default_pg"],
        }
        for i, (name, size) in enumerate([("nccl:all_gather", 8), ("nccl:all_reduce", 2)] * 10)
    ]
    return {"version": "2.4", "entries": entries}


def test_flight_recorder_dumps_read_alike_in_both_formats(tmp_path):
    (tmp_path / "dump.json").write_text(json.dumps(dump()))
    (tmp_path / "dump.pickle").write_bytes(pickle.dumps(dump()))
    (tmp_path / "dump.json.gz").write_bytes(gzip.compress(json.dumps(dump()).encode()))
    ops = read_flight_recorder(tmp_path / "dump.json")
    assert ops == read_flight_recorder(tmp_path / "dump.pickle")
    assert ops == read_flight_recorder(tmp_path / "dump.json.gz")
    assert ops[0].num_bytes == 8 * 4 * 2
    period = infer_period(ops)
    assert period.num_ops == 2
    assert period.iteration_times_s == pytest.approx([0.02] * 9)


def test_a_pickle_that_could_run_code_is_refused(tmp_path):
    (tmp_path / "bad").write_bytes(pickle.dumps({"entries": [print]}))
    with pytest.raises(ConfigurationError, match="could run code"):
        read_flight_recorder(tmp_path / "bad")


@pytest.mark.parametrize(
    "content", [b"{}", b"{", b"[]", b"", b"\x80\x04", b'{"entries": [{"a": 1}]}', b'{"entries": 3}']
)
def test_broken_files_are_named(tmp_path, content):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(ConfigurationError, match="bad"):
        read_flight_recorder(tmp_path / "bad")
    with pytest.raises(ConfigurationError, match="bad"):
        read_profiler_trace(tmp_path / "bad")
