"""Texts such as "80 GiB", "400 Gbit/s" and "20 us" as numbers in the unit of a field.

The unit is the end of the field's name, as everywhere in this package: `memory_bytes`,
`inter_node_bytes_per_s`, `latency_s`, `peak_flops_per_s`. A bare number is in that unit.
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from enum import StrEnum

__all__ = ["MeasureUnit", "parse_quantity", "unit_of_field"]


class MeasureUnit(StrEnum):
    """The unit of a number, as messages name it."""

    BYTES = "bytes"
    BYTES_PER_S = "bytes/s"
    FLOPS_PER_S = "FLOP/s"
    SECONDS = "seconds"


_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}


def _sizes() -> dict[str, float]:
    factors = {**_DECIMAL, **_BINARY}
    as_bytes = {
        f"{prefix}{name}": factor
        for name in ("B", "byte", "bytes")
        for prefix, factor in factors.items()
    }
    as_bits = {
        f"{prefix}{name}": factor / 8
        for name in ("b", "bit", "bits")
        for prefix, factor in factors.items()
    }
    return {**as_bytes, **as_bits}


_BYTES = _sizes()
_FACTORS: Mapping[MeasureUnit, Mapping[str, float]] = {
    MeasureUnit.BYTES: _BYTES,
    MeasureUnit.BYTES_PER_S: {
        f"{name}{per}": factor for name, factor in _BYTES.items() for per in ("/s", "ps")
    },
    MeasureUnit.FLOPS_PER_S: {
        f"{prefix}{name}": factor
        for prefix, factor in _DECIMAL.items()
        for name in ("FLOP/s", "FLOPs", "FLOPS", "flop/s", "flops")
    },
    MeasureUnit.SECONDS: {
        "s": 1,
        "ms": 1e-3,
        "us": 1e-6,
        "µs": 1e-6,
        "μs": 1e-6,
        "ns": 1e-9,
        "min": 60,
        "h": 3600,
    },
}
_EXAMPLES = {
    MeasureUnit.BYTES: "80 GiB",
    MeasureUnit.BYTES_PER_S: "12.5 GB/s' or '400 Gbit/s",
    MeasureUnit.FLOPS_PER_S: "312 TFLOP/s",
    MeasureUnit.SECONDS: "20 us",
}
_TEXT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?)\s*([^\d\s.]\S*)?\s*")


def unit_of_field(name: str) -> MeasureUnit | None:
    """Return the unit that a field's name ends in, None if it counts something else."""
    for ending, unit in (
        ("bytes_per_s", MeasureUnit.BYTES_PER_S),
        ("flops_per_s", MeasureUnit.FLOPS_PER_S),
        ("_bytes", MeasureUnit.BYTES),
        ("_s", MeasureUnit.SECONDS),
    ):
        if name.endswith(ending):
            return unit
    return None


def parse_quantity(text: str, unit: MeasureUnit | None) -> float:
    """Return a text's number in `unit`; the message of a ValueError says what to write instead."""
    found = _TEXT.fullmatch(text)
    wanted = "a number" if unit is None else f"a number of {unit}, such as '{_EXAMPLES[unit]}'"
    if found is None or len(text) > 100:
        raise ValueError(wanted)
    number, name = found.groups()
    if name is None:
        return float(number)
    factor = None if unit is None else _FACTORS[unit].get(name)
    if factor is None:
        raise ValueError(wanted)
    # In decimals, so that 20 us is 20e-6 to the last digit.
    return float(Decimal(number) * Decimal(repr(factor)))
