"""Laws of the profile that all ranks of a run share."""

import dataclasses
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.profile import Profile
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import Seat, slowed
from lightning_hetero.runtime.setup.profile_cache import profile_seats
from lightning_hetero.runtime.setup.profiling import ProfileOptions
from tests.processes import ProcessPool
from tests.runtime.setup.test_profiling import TINY


def _seat(base: str, slowdown: float) -> Seat:
    device = DeviceSpec(
        name=base,
        peak_flops_per_s=1e10,
        memory_bytes=2**30,
        memory_bytes_per_s=1e10,
        intra_node_bytes_per_s=1e9,
    )
    return Seat(host="here", device=slowed(device, slowdown), base=base, slowdown=slowdown)


def _profile_on_rank(global_rank: int, cache: Path) -> tuple[Profile, Profile, str]:
    dist.init_process_group("gloo")
    cpu = torch.device("cpu")
    comms = Communicators.create(device=cpu, timeout=timedelta(minutes=2))
    options = ProfileOptions(microbatches=((8,),), max_block=1, num_repeats=1)
    seats = (_seat("fast", 1.0), _seat("slow", 2.0))
    too_fine = dataclasses.replace(options, tp_degrees=(3,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_HETERO_CACHE", str(cache))
        profiles = [profile_seats(TINY, options, seats, comms, cpu) for _ in range(2)]
        with pytest.raises(ProfileError) as refused:
            profile_seats(TINY, too_fine, seats, comms, cpu)
    return profiles[0], profiles[1], str(refused.value)


@pytest.mark.dist
def test_all_ranks_get_one_profile_measured_once_or_the_same_error(
    pool: ProcessPool, tmp_path: Path
) -> None:
    (profile, again, error), other = pool.run(_profile_on_rank, 2, tmp_path)
    assert other == (profile, again, error)
    assert again == profile, "the second time it comes from the cache"
    assert [device.device for device in profile.devices] == ["fast", "slow/2"]
    assert len(list(tmp_path.iterdir())) == 2
    assert "Rank 0 (fast)" in error
    assert "Rank 1 (slow)" in error
