"""`lightning-hetero stragglers explain TRACE [--layout META.yaml] [--json FILE]`."""

import json
from pathlib import Path

import yaml

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.texts import format_table
from lightning_hetero.straggler.operations.trace import OperationTrace, read_operations
from lightning_hetero.straggler.operations.what_if import Layout, answer, explain

__all__ = ["explain_trace"]


def explain_trace(path: Path, layout_path: Path | None, json_path: Path | None) -> int:
    """Print why the run of an operation trace was slow; return the exit code.

    Raises:
        ConfigurationError: A file can't be read or written.
    """
    trace = read_operations(path)
    if layout_path is None and (path / "layout.yaml").is_file():
        layout_path = path / "layout.yaml"
    layout = _read_layout(layout_path, trace) if layout_path is not None else None
    found = explain(trace)
    print(answer(found, layout))
    rows = [
        (
            cause.kind,
            "" if cause.which is None else str(cause.which),
            *(f"{value:.2f}" for value in (cause.share, cause.removed, cause.kept)),
        )
        for cause in found.causes
    ]
    if rows:
        print(format_table(("cause", "which", "share", "only it removed", "only it kept"), rows))
    if json_path is not None:
        try:
            json_path.write_text(json.dumps(found.to_dict(), indent=1) + "\n")
        except OSError as error:
            raise ConfigurationError(f"Can't write {json_path}: {error}") from error
    return 0


def _read_layout(path: Path, trace: OperationTrace) -> Layout:
    try:
        entry = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"Can't read the layout {path}: {error}") from error
    return Layout.from_dict(entry, trace)
