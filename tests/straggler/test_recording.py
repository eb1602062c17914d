"""`record()` watches a job that knows nothing of it: plain DDP in two processes."""

import pathlib
import subprocess

import pytest
import torch

from lightning_hetero import straggler
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler import read_times
from tests.fast_python import fast_python
from tests.processes import clean_environment, free_port

ROOT = pathlib.Path(__file__).parents[3]

NUM_STEPS = 24
SLOW = range(12, 16)


JOB = f"""
import sys, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightning_hetero.straggler
lightning_hetero.straggler.record(sys.argv[1])

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range({NUM_STEPS}):
    time.sleep(0.6 if {SLOW[0]} <= step <= {SLOW[-1]} else 0.01)
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
# With torch 2.13 a DDP model that is freed after its group may hang, without `record`, too.
del model, optimizer
dist.destroy_process_group()
"""


@pytest.mark.dist
def test_one_line_records_plain_ddp_in_each_process(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [fast_python(), "job.py", "records"],
            cwd=tmp_path,
            env=clean_environment(**address, RANK=str(rank), PYTHONPATH=str(ROOT)),
        )
        for rank in (0, 1)
    ]
    assert [process.wait(300) for process in processes] == [0, 0]
    for rank in (0, 1):
        found = read_times(tmp_path / "records" / f"rank{rank}.jsonl")
        assert len(found.times_s) == NUM_STEPS - 1
        slow = [index + 1 for index, time_s in enumerate(found.times_s) if time_s > 0.5]
        assert set(SLOW) <= set(slow)


def test_a_job_in_one_process_is_recorded_until_stopped_by_its_largest_optimizer(tmp_path):
    optimizers = [torch.optim.AdamW(torch.nn.Linear(n, n).parameters()) for n in (2, 8)]
    with straggler.record(tmp_path) as recording:
        for _ in range(5):
            for optimizer in optimizers:
                optimizer.step()
    optimizers[1].step()
    assert len(recording.path.read_text().splitlines()) == 4
    recording.stop()


def test_a_folder_that_can_not_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="Can't make the folder"):
        straggler.record(tmp_path / "file" / "records")
