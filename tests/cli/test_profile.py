import contextlib
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.cli import main
from lightning_hetero.cli.profile import measure_links
from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.profile import LinkTimes, Profile
from tests.core.cluster_files import text_of
from tests.processes import ProcessPool

SIZES = """
name: tiny
num_layers: 4
hidden_size: 32
num_heads: 4
num_kv_heads: 2
intermediate_size: 64
vocab_size: 96
gated_mlp: true
tied_embeddings: false
"""


@pytest.fixture
def words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SIZES)
    options = "--device cpu --device-name core --sequence-lengths 16 32 --repeats 1"
    return f"profile --model tiny.yaml --output p.json {options}".split()


CORE = DeviceSpec(
    name="core",
    peak_flops_per_s=1e10,
    memory_bytes=2**30,
    memory_bytes_per_s=1e10,
    intra_node_bytes_per_s=1e9,
)


def test_a_measured_profile_serves_simulate_with_its_messages_and_plan_with_its_device(
    words, capsys
):
    assert main([*words]) == 0
    assert "written to p.json" in capsys.readouterr().out
    cluster = Cluster(nodes=(Node(device="core", count=1),) * 2, devices=(CORE,))
    Path("c.yaml").write_text(text_of(cluster))
    ParallelPlan.even(world_size=2, num_layers=4, num_stages=2).save("plan.json")
    slow = LinkTimes(bytes_per_s=1e3, latency_s=1.0)
    dataclasses.replace(Profile.load("p.json"), between_nodes=slow).save("slow.json")
    batch = "--cluster c.yaml --model tiny.yaml --sequence-length 16 --global-batch-size 4"
    seconds = []
    for file in ("p.json", "slow.json"):
        assert main(f"simulate plan.json {batch} --profile {file} --json".split()) == 0
        seconds.append(json.loads(capsys.readouterr().out)["iteration_time_s"])
    assert seconds[1] > seconds[0] + 4.0
    Path("c.yaml").write_text("nodes: [{device: core, count: 2}]")
    assert main(f"plan {batch} --profile p.json".split()) == 0
    assert "2 × core" in capsys.readouterr().out
    assert main(f"plan {batch}".split()) == 2
    assert "Unknown device 'core'" in capsys.readouterr().err
    assert main([*words, "--device-name", "other", "--merge", "p.json"]) == 0
    assert [device.device for device in Profile.load("p.json").devices] == ["core", "other"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--tp-degrees", "3"], "doesn't divide"),
        (["--device", "abacus"], "isn't a device"),
        (["--output", "no/where.json"], "folder doesn't exist"),
        (["--merge", "none.json"], "Can't read the profile"),
        (["--sequence-lengths", "16", "0"], "samples of [16, 0] tokens"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, change, message, capsys):
    assert main([*words, *change]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def _measure(rank: int) -> list[dict[str, LinkTimes]]:
    dist.init_process_group("gloo")
    small = {"num_bytes": (64, 4096), "repeats": 1}
    cpu = torch.device("cpu")
    return [measure_links(cpu, node=names[rank], **small) for names in ("aab", "abc")]


def _profile(rank: int, folder: Path, words: list[str]) -> bool:
    own = folder / str(rank)
    own.mkdir()
    with contextlib.chdir(own):
        Path("tiny.yaml").write_text(SIZES)
        assert main(words) == 0
        return Path("p.json").exists()


@pytest.mark.dist
def test_messages_are_measured_inside_a_node_and_between_nodes(pool: ProcessPool):
    (links, alone), *others = pool.run(_measure, 3)
    assert others == [[links, alone]] * 2
    assert [*links] == ["inside the node", "between nodes"]
    assert [*alone] == ["between nodes"]


@pytest.mark.dist
def test_torchruns_ranks_write_one_profile_with_messages(words, tmp_path, pool: ProcessPool):
    assert pool.run(_profile, 2, tmp_path, words) == [True, False]
    written = Profile.load(tmp_path / "0" / "p.json")
    assert written.devices[0].inside_node is not None, "both ranks are on this machine"
    assert written.between_nodes is None
