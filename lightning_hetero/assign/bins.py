"""Spread items over bins so that the fullest bin has the least load, for many problems at once.

A row is one problem: its items, its number of bins and the most tokens a bin holds. Longest first
(LPT) gives a start; then each step moves or swaps one item out of the fullest bin, in all rows
together. With R rows, U items and V bins a step costs about 25 NumPy calls on [R, U, U + V] arrays.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np

from lightning_hetero.core.arrays import BoolArray, FloatArray, IntArray

__all__ = ["BinRows", "balance", "improve_balance"]

_BLOCKED = 1e30
_GAIN = 1e-9
_MAX_STEPS = 60
"""Most moves and swaps in a row."""


@dataclass(frozen=True, kw_only=True)
class BinRows:
    """R problems, and the bin of each of their items."""

    times_s: FloatArray
    """[R, U] seconds of each item, descending, then 0 if a row has fewer items."""
    tokens: FloatArray
    """[R, U] tokens of each item, then 0 if a row has fewer."""
    num_bins: IntArray
    """[R] number of bins."""
    max_tokens: FloatArray
    """[R] most tokens in a bin."""
    bin_of: IntArray
    """[R, U] bin of each item."""
    is_valid: BoolArray
    """[R] whether every item found room."""

    def only(self, rows: IntArray) -> Self:
        """Return only the problems of these rows."""
        return type(self)(**{item.name: getattr(self, item.name)[rows] for item in fields(self)})

    def loads_s(self) -> FloatArray:
        """Return the seconds in each bin, [R, V]; -1 for bins that a row doesn't have."""
        loads_s = _bin_sums(self.times_s, self.bin_of, int(self.num_bins.max()))
        loads_s[_missing_bins(self.num_bins)] = -1.0
        return loads_s

    def fullest_s(self) -> FloatArray:
        """Return the seconds of the fullest bin, [R]; infinite for invalid rows."""
        return np.where(self.is_valid, self.loads_s().max(axis=1), np.inf)


def balance(
    times_s: FloatArray,
    tokens: FloatArray,
    num_bins: IntArray,
    max_tokens: FloatArray,
    *,
    tightest: bool = False,
) -> BinRows:
    """Return each row's items spread longest first, each into the bin of least load with room.

    With `tightest` each goes into the bin with the least room that suffices, which may find room
    for all items if the other rule doesn't. See `BinRows` for the arguments.
    """
    num_rows, num_items = times_s.shape
    rows = np.arange(num_rows)
    loads_s = np.where(_missing_bins(num_bins), _BLOCKED, 0.0)
    room = np.repeat(max_tokens[:, None], loads_s.shape[1], axis=1)
    bin_of = np.zeros((num_rows, num_items), dtype=np.int64)
    is_valid = np.ones(num_rows, dtype=bool)
    for item in range(num_items):
        blocked = np.where(room < tokens[:, item, None], _BLOCKED, 0.0)
        keys = np.where(loads_s < _BLOCKED, room, _BLOCKED) if tightest else loads_s
        keys = keys + blocked
        chosen = keys.argmin(axis=1)
        is_valid &= keys[rows, chosen] < _BLOCKED
        bin_of[:, item] = chosen
        loads_s[rows, chosen] += times_s[:, item]
        room[rows, chosen] -= tokens[:, item]
    return BinRows(
        times_s=times_s,
        tokens=tokens,
        num_bins=num_bins,
        max_tokens=max_tokens,
        bin_of=bin_of,
        is_valid=is_valid,
    )


def improve_balance(rows: BinRows, *, stop_at_s: FloatArray) -> BinRows:
    """Return the rows after moves and swaps out of the fullest bin; never a worse row.

    Args:
        rows: The problems; invalid ones are left as they are.
        stop_at_s: [R] lower bounds of the fullest bin; a row that reaches its bound is finished.
    """
    bin_of = rows.bin_of.copy()
    active = np.flatnonzero(rows.is_valid)
    for _ in range(_MAX_STEPS):
        if not len(active):
            break
        part = replace(rows, bin_of=bin_of).only(active)
        changed, improved = _step(part, stop_at_s[active])
        active = active[improved]
        bin_of[active] = changed[improved]
    return replace(rows, bin_of=bin_of)


def _step(part: BinRows, stop_at_s: FloatArray) -> tuple[IntArray, BoolArray]:
    """Return the bins after the best change of each row, and which rows changed."""
    num_rows, num_items = part.times_s.shape
    rows = np.arange(num_rows)
    loads_s = part.loads_s()
    used = _bin_sums(part.tokens, part.bin_of, loads_s.shape[1])
    fullest = loads_s.argmax(axis=1)
    peak_s = loads_s[rows, fullest]
    ends_s = np.concatenate(
        [_swap_ends(part, loads_s, used, fullest), _move_ends(part, loads_s, used, fullest)], axis=2
    )
    width = ends_s.shape[2]
    flat = ends_s.reshape(num_rows, -1)
    best = flat.argmin(axis=1)
    improved = flat[rows, best] < peak_s * (1 - _GAIN)
    improved &= peak_s > stop_at_s * (1 + _GAIN)
    item, target = np.divmod(best, width)
    bin_of = part.bin_of.copy()
    is_swap = improved & (target < num_items)
    swapped, partner = rows[is_swap], target[is_swap]
    bin_of[swapped, item[is_swap]] = part.bin_of[swapped, partner]
    bin_of[swapped, partner] = fullest[is_swap]
    is_move = improved & (target >= num_items)
    bin_of[rows[is_move], item[is_move]] = target[is_move] - num_items
    return bin_of, improved


def _swap_ends(
    part: BinRows, loads_s: FloatArray, used: FloatArray, fullest: IntArray
) -> FloatArray:
    """Return the larger load [R, U, U] of both bins if item 1 of the fullest and item 2 swap."""
    rows = np.arange(len(fullest))
    own_s = loads_s[rows, fullest][:, None, None]
    there_s = np.take_along_axis(loads_s, part.bin_of, axis=1)[:, None, :]
    delta_s = part.times_s[:, :, None] - part.times_s[:, None, :]
    ends_s = np.maximum(own_s - delta_s, there_s + delta_s)
    delta = part.tokens[:, :, None] - part.tokens[:, None, :]
    limit = part.max_tokens[:, None, None]
    inside = part.bin_of == fullest[:, None]
    is_possible = inside[:, :, None] & ~inside[:, None, :] & (part.times_s > 0)[:, None, :]
    is_possible &= np.take_along_axis(used, part.bin_of, axis=1)[:, None, :] + delta <= limit
    is_possible &= used[rows, fullest][:, None, None] - delta <= limit
    return np.where(is_possible, ends_s, _BLOCKED)


def _move_ends(
    part: BinRows, loads_s: FloatArray, used: FloatArray, fullest: IntArray
) -> FloatArray:
    """Return the larger load [R, U, V] of both bins if an item of the fullest moves to a bin."""
    rows = np.arange(len(fullest))
    own_s = loads_s[rows, fullest][:, None, None]
    ends_s = np.maximum(
        own_s - part.times_s[:, :, None], loads_s[:, None, :] + part.times_s[:, :, None]
    )
    is_possible = (part.bin_of == fullest[:, None])[:, :, None] & (loads_s >= 0)[:, None, :]
    is_possible &= (part.times_s > 0)[:, :, None]
    is_possible &= used[:, None, :] + part.tokens[:, :, None] <= part.max_tokens[:, None, None]
    ends_s = np.where(is_possible, ends_s, _BLOCKED)
    ends_s[rows, :, fullest] = _BLOCKED
    return ends_s


def _missing_bins(num_bins: IntArray) -> BoolArray:
    return np.arange(int(num_bins.max()))[None, :] >= num_bins[:, None]


def _bin_sums(values: FloatArray, bin_of: IntArray, num_bins: int) -> FloatArray:
    """Return the sums [R, V] of values [R, U] by bin."""
    num_rows = len(values)
    cells = bin_of + np.arange(num_rows)[:, None] * num_bins
    sums = np.bincount(cells.ravel(), weights=values.ravel(), minlength=num_rows * num_bins)
    return sums.reshape(num_rows, num_bins).astype(np.float64, copy=False)
