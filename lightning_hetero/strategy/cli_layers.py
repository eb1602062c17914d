"""Let LightningCLI take `layers: [0, 4]` in YAML, as a plan's JSON does, beside "range(0, 4)"."""

from jsonargparse.typing import range_serializer, register_type

from lightning_hetero.core.reading import parse_range

__all__ = ["register_layers"]


def register_layers() -> None:
    """Teach jsonargparse, which LightningCLI parses with, to read ranges in both spellings.

    What it could read before, such as "range(4)", it still reads.
    """
    register_type(range, serializer=range_serializer, deserializer=_read)


def _read(value: object) -> range:
    if isinstance(value, str):
        digits = value.replace(" ", "").removeprefix("range(").removesuffix(")").split(",")
        if value.strip().startswith("range(") and all(d.lstrip("-").isdigit() for d in digits):
            return range(*map(int, digits))
    return parse_range(value)
