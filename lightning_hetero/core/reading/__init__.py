"""Read files of users and other programs: text, then plain data, then dataclasses.

`text` turns a file into plain data, `fields` plain data into a dataclass (with pydantic),
`quantities` a text such as "80 GiB" into a number. The result is always a valid object or one of
our own errors, which names the place in the file, the wrong value and what to write instead.
"""

from lightning_hetero.core.reading.fields import LayerRange, build, parse_range, readable
from lightning_hetero.core.reading.quantities import parse_quantity, unit_of_field
from lightning_hetero.core.reading.text import (
    load_file,
    nearest,
    parse_json,
    parse_yaml,
    read_text,
    show,
)

__all__ = [
    "LayerRange",
    "build",
    "load_file",
    "nearest",
    "parse_json",
    "parse_quantity",
    "parse_range",
    "parse_yaml",
    "read_text",
    "readable",
    "show",
    "unit_of_field",
]
