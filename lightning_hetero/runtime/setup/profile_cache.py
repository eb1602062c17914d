"""Measure the device types of a run once, and remember it on disk.

Each type of hardware is measured by its first rank, all types at once, unless a cached profile of
the same model, micro-batches, device and versions is there. One that is too old, broken or of other
versions is refused and measured again. Emulated devices are their hardware's figures times their
slowdown, by definition. The folder is `$LIGHTNING_HETERO_CACHE`, else `lightning-hetero` in the
user's cache folder.
"""

import contextlib
import datetime
import functools
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace

import torch

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.process.cache import cache_folder, write_whole
from lightning_hetero.core.profile import BlockTimes, DeviceProfile, Profile
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import Seat
from lightning_hetero.runtime.setup.profiling import (
    ProfileOptions,
    current_versions,
    measure_profile,
)

__all__ = ["cached_profile", "profile_seats", "slowed_profile"]

_MAX_AGE = datetime.timedelta(days=30)


def profile_seats(
    model: ModelSpec,
    options: ProfileOptions,
    seats: Sequence[Seat],
    comms: Communicators,
    device: torch.device,
) -> Profile:
    """Return a profile of all device types of the run; collective over all ranks.

    Raises:
        ProfileError: A rank couldn't measure; every rank raises it, with that rank's words.
    """
    first_ranks: dict[str, int] = {}
    for global_rank, seat in enumerate(seats):
        first_ranks.setdefault(seat.base, global_rank)
    base = seats[comms.global_rank].base
    mine: Profile | str | None = None
    if first_ranks[base] == comms.global_rank:
        try:
            mine = cached_profile(model, options, device_name=base, device=device)
        except (ProfileError, RuntimeError) as error:
            mine = f"Rank {comms.global_rank} ({base}) couldn't be measured: {error}"
    answers = comms.gather_objects(mine)
    failures = [answer for answer in answers if isinstance(answer, str)]
    if failures:
        raise ProfileError(" ".join(failures))
    measured = [answer for answer in answers if isinstance(answer, Profile)]
    merged = functools.reduce(Profile.merge, measured)
    slowdowns = {seat.device.name: (seat.base, seat.slowdown) for seat in seats}
    devices = tuple(
        slowed_profile(merged.device(base), slowdown, name=name)
        for name, (base, slowdown) in slowdowns.items()
    )
    return replace(merged, devices=devices)


def cached_profile(
    model: ModelSpec, options: ProfileOptions, *, device_name: str, device: torch.device
) -> Profile:
    """Return the cached profile of this device, measured now if there is none that holds.

    Raises:
        ProfileError: The model can't be measured.
    """
    path = cache_folder() / f"{_digest(model, options, device_name)}.json"
    with contextlib.suppress(ProfileError):
        profile = Profile.load(path)
        profile.check(model=model, versions=current_versions(), max_age=_MAX_AGE)
        profile.device(device_name)
        return profile
    profile = measure_profile(model, options, device_name=device_name, device=device)
    # A folder that can't be written costs only the next run's time.
    with contextlib.suppress(OSError):
        write_whole(path, profile.save)
    return profile


def slowed_profile(profile: DeviceProfile, slowdown: float, *, name: str) -> DeviceProfile:
    """Return the figures of a device whose forwards and backwards take longer by that factor.

    The optimizer's step keeps its time: it isn't part of any action that is stretched.
    """

    def slower(pair: tuple[float, float]) -> tuple[float, float]:
        return pair[0] * slowdown, pair[1] * slowdown

    def times(entry: BlockTimes) -> BlockTimes:
        return replace(
            entry,
            blocks={size: slower(pair) for size, pair in entry.blocks.items()},
            embedding=slower(entry.embedding),
            head=slower(entry.head),
        )

    return replace(profile, device=name, times=tuple(map(times, profile.times)))


def _digest(model: ModelSpec, options: ProfileOptions, device_name: str) -> str:
    sizes = replace(model, name="").to_dict()
    key = [sizes, repr(options), device_name, torch.get_num_threads(), current_versions()]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
