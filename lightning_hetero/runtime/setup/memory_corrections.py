"""Keep memory corrections, learnt from running out of memory, on disk beside measured profiles.

There is one file for each device type and model, in the folder of `core.process`. A start on
the same machine reads it before anything is planned, and shares it with the other ranks. Files that
are older than 30 days, broken or of other versions are ignored.
"""

import contextlib
import datetime
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.process import cache_folder, write_whole
from lightning_hetero.core.reading import build
from lightning_hetero.core.slices import ParameterSpec
from lightning_hetero.core.texts import load_file, parse_json
from lightning_hetero.runtime.setup.profiling import current_versions
from lightning_hetero.simulator import MemoryCorrection

__all__ = ["CorrectionFile"]

_MAX_AGE = datetime.timedelta(days=30)


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
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        return cls(path=cache_folder() / f"memory-{digest}.json")

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
