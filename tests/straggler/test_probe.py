"""Laws of the probes, on gloo processes: every pair is measured, a slow link is named."""

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_hetero.straggler import FindingKind, diagnose, ring_rounds
from lightning_hetero.straggler.probe import probe_device, probe_devices, probe_links

NUM_BYTES = 4096


def probe_all(rank, world_size, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
    )
    device = torch.device("cpu")
    devices = probe_devices(device, size=64, repeats=2)
    links = probe_links(ring_rounds(range(world_size)), device, num_bytes=NUM_BYTES, repeats=2)
    torch.save((devices, links), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_learns_every_probe(tmp_path, world_size):
    mp.spawn(probe_all, args=(world_size, str(tmp_path)), nprocs=world_size)
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(world_size)]
    devices, links = results[0]
    assert all(result == results[0] for result in results)
    assert sorted(devices) == list(range(world_size))
    expected = {pair for pairs in ring_rounds(range(world_size)) for pair in pairs}
    assert set(links) == expected
    assert all(seconds > 0.0 for seconds in (*devices.values(), *links.values()))


def delay_link(rank, world_size, folder):
    real_send = dist.send

    def slow_send(tensor, dst, **options):
        if {rank, dst} == {1, 2}:
            time.sleep(0.5)  # Far above what a busy machine adds to the other links.
        return real_send(tensor, dst, **options)

    dist.send = slow_send
    probe_all(rank, world_size, folder)


@pytest.mark.dist
def test_a_delayed_link_is_named(tmp_path):
    mp.spawn(delay_link, args=(4, str(tmp_path)), nprocs=4)
    _, links = torch.load(tmp_path / "0.pt")
    finding = diagnose({}, links, least_ratio=100.0)[0]
    assert (finding.kind, finding.ranks) == (FindingKind.LINK, (1, 2))


def test_a_device_probe_is_positive_and_grows_with_size():
    device = torch.device("cpu")
    assert 0.0 < probe_device(device, size=16) < probe_device(device, size=768)
