"""Keep on disk what was measured of devices, so that a later start needn't measure again.

A profile is made once for each type of hardware in a run, by the first rank that has it. It is used
again for the same model, micro-batches, device and package versions. An emulated device has the
times of its hardware, multiplied by its slowdown. A `CorrectionFile` keeps how far the prediction
of memory was off when a device ran out of it, for later starts with the same device type and model.

Both are in the folder `$LIGHTNING_HETERO_CACHE`, or else in `lightning-hetero` in the user's cache.
Files that are older than 30 days, broken or of other versions are ignored.
"""

import contextlib
import datetime
import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.process import cache_folder, write_whole
from lightning_hetero.core.profile import DeviceProfile, Profile
from lightning_hetero.core.reading import build
from lightning_hetero.core.texts import load_file, parse_json
from lightning_hetero.exchange.slices import ParameterSpec
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.detect import Seat
from lightning_hetero.runtime.setup.profiling import (
    ProfileOptions,
    current_versions,
    measure_profile,
)
from lightning_hetero.simulator import MemoryCorrection

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
        ProfileError: A rank couldn't measure; every rank raises it, with that rank's message.
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
    """Return the cached profile of this device; measure it now if there is no valid one."""
    sizes = replace(model, name="").to_dict()
    key = [sizes, repr(options), device_name, torch.get_num_threads(), current_versions()]
    path = cache_folder() / f"{_digest(key)}.json"
    with contextlib.suppress(ProfileError):
        profile = Profile.load(path)
        profile.check(model=model, versions=current_versions(), max_age=_MAX_AGE)
        profile.device(device_name)
        return profile
    profile = measure_profile(model, options, device_name=device_name, device=device)
    # If the folder can't be written, only the next run has to measure again.
    with contextlib.suppress(OSError):
        write_whole(path, profile.save)
    return profile


def slowed_profile(profile: DeviceProfile, slowdown: float, *, name: str) -> DeviceProfile:
    """Return a profile with the times of forward and backward passes multiplied by a factor.

    The optimizer's step keeps its time, because emulation slows down only actions of the schedule.
    """

    def slower(pair: tuple[float, float]) -> tuple[float, float]:
        return pair[0] * slowdown, pair[1] * slowdown

    times = tuple(
        replace(
            entry,
            blocks={size: slower(pair) for size, pair in entry.blocks.items()},
            embedding=slower(entry.embedding),
            head=slower(entry.head),
        )
        for entry in profile.times
    )
    return replace(profile, device=name, times=times)


def _digest(key: list[object]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class CorrectionFile:
    """The file with the memory correction of one model on one device type."""

    path: Path

    @classmethod
    def of(
        cls, specs: Iterable[ParameterSpec], compute_bytes: int, device_name: str
    ) -> "CorrectionFile":
        """Return the file of a model that computes in values of `compute_bytes` bytes."""
        shapes = [(spec.name, spec.shape) for spec in specs]
        key = [shapes, compute_bytes, device_name, current_versions()]
        return cls(path=cache_folder() / f"memory-{_digest(key)}.json")

    def read(self) -> MemoryCorrection:
        """Return the correction; the default, which changes nothing, if there is no valid file."""
        with contextlib.suppress(ProfileError, OSError):
            age_s = datetime.datetime.now().timestamp() - self.path.stat().st_mtime
            if age_s <= _MAX_AGE.total_seconds():
                return load_file(self.path, "memory correction", ProfileError, _parse)
        return MemoryCorrection()

    def add(self, found: MemoryCorrection) -> None:
        """Write the stricter of the known correction and a new one.

        Raises:
            OSError: The folder can't be written.
        """
        text = json.dumps(asdict(self.read().join(found))) + "\n"
        write_whole(self.path, lambda file: file.write_text(text, encoding="utf-8"))


def _parse(text: str) -> MemoryCorrection:
    data = parse_json(text, "memory correction", ProfileError)
    return build(MemoryCorrection, data, "memory correction", ProfileError)
