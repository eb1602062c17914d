"""Laws of the probes, on gloo processes: every pair is measured, a slow link is named."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.straggler import probe as probe_module
from lightning_hetero.straggler.locate import find_suspects, ring_of, rounds_of
from lightning_hetero.straggler.probe import probe_device, probe_links

NUM_BYTES = 4096


def probe_all(rank, world_size):
    dist.init_process_group("gloo")
    device = torch.device("cpu")
    devices = {rank: probe_device(device, size=64)}
    links = probe_links(
        rounds_of(ring_of(range(world_size))), device, num_bytes=NUM_BYTES, repeats=2
    )
    return devices, links


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_learns_every_probe(pool, world_size):
    results = pool.run(probe_all, world_size, world_size)
    devices, links = results[0]
    assert all(result[1] == links for result in results)
    assert set(links) == {*ring_of(range(world_size))}
    assert all(seconds > 0.0 for seconds in (*devices.values(), *links.values()))


class CountedTime:
    """Stands still but for what messages are said to take: no machine is too busy for it."""

    def __init__(self):
        self.now_s = 0.0

    def perf_counter(self):
        return self.now_s


def delay_link(rank, world_size):
    clock, real_send = CountedTime(), dist.send

    def send(tensor, dst, **options):
        clock.now_s += 0.05 if {rank, dst} == {1, 2} else 0.01
        return real_send(tensor, dst, **options)

    with mock.patch.object(dist, "send", send), mock.patch.object(probe_module, "time", clock):
        return probe_all(rank, world_size)


@pytest.mark.dist
def test_a_delayed_link_is_named(pool):
    _, links = pool.run(delay_link, 4, 4)[0]
    assert links[1, 2] == pytest.approx(0.05)
    assert next(iter(find_suspects(links))) == (1, 2)


def test_a_device_probe_is_positive_and_grows_with_size():
    device = torch.device("cpu")
    assert 0.0 < probe_device(device, size=16) < probe_device(device, size=768)
