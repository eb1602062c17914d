"""Find out by trial whether a loss mixes samples, or selects them by their positions.

The rules of `reductions` know torch's functions by their names. The trial looks at numbers: with h
the activation that the layers return and h' one with other values, the samples of a part S of the
micro-batch add to the loss f independently of the others exactly if

    f(h) - f(h' in S) - f(h' outside of S) + f(h') = 0

for every S, where f is the loss times the count that it averages over. It holds for sums and means
over samples, masked or not, and for no loss that mixes samples of S with others: by pairs made by
hand, by statistics, by taking the hardest samples. A loss that leaves out samples by position, such
as the first row, doesn't change with their values. A loss that weighs samples by position changes
if samples are permuted, but not if its constants are permuted with them.

The functions are called again on other activations, the step is not. A micro-batch of one sample is
tried as if it held that sample twice. If functions can't be called again, the trial finds nothing,
and only the rules judge.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hetero.models.batches import tensors_of
from lightning_hetero.runtime.results.numbers.sample_places import sample_groupings
from lightning_hetero.runtime.results.numbers.torch_calls import is_parameter
from lightning_hetero.runtime.results.recording import Call, Change, Recording, Value
from lightning_hetero.runtime.slices.digests import is_looked_at

__all__ = ["LossTrial", "LossTrials"]

_NUM_TRIALS = 6
_NEGLIGIBLE = 1e-5
"""Share of the changes of a loss that rounding may explain."""
_ROUNDINGS = 64
"""The same, as a number of roundings of the loss itself."""
_STRONG, _WEAK = 8.0, 0.5
"""Factors for the other values of h'."""
_ALL_LARGER, _ALL_SMALLER = (8.0, 4.0), (0.5, 0.25)
"""Factors for the samples' own values, of which none is 1: every sample changes."""
_PARTS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda samples, count: samples < count // 2,
    lambda samples, count: samples % 2 == 0,
    lambda samples, count: samples // 2 % 2 == 0,
)
"""Masks of parts S: together they separate halves, neighbours and pairs of neighbours."""
_TAKING_ROWS = {"getitem", "index_select", "gather", "take_along_dim", "take", "index_put"}
"""Functions that take numbers as indices."""


class LossTrials:
    """Chooses the iterations whose losses are tried: the first one, and few later ones.

    A trial takes several times as long as the loss. After ranks were lost or have come the first
    iteration isn't tried again: the code is the same.
    """

    def __init__(self) -> None:
        self.is_known = False
        """Whether an iteration whose loss was tried has ended."""
        self._is_under_way = False

    def begin(self, batch_idx: int) -> bool:
        """Return whether the loss of an iteration that begins is tried."""
        self.is_known |= self._is_under_way  # The trial has passed, else the run would have ended.
        self._is_under_way = not self.is_known
        return self._is_under_way or is_looked_at(batch_idx + 1)


class LossTrial:
    """The trial of one micro-batch's loss.

    Args:
        microbatch: What the step gets. If samples are packed end to end it says where each begins,
            and where the last one ends, in `cu_seqlens`.
        num_samples: Samples of the micro-batch; 0 if unknown.
        is_cut: Whether the batch has more samples than the micro-batch.
    """

    def __init__(self, microbatch: Any, num_samples: int, *, is_cut: bool = False) -> None:
        self.recording: Recording | None = None
        self._is_cut = is_cut
        self._microbatch = microbatch
        self._num_samples = num_samples
        self._starts: Tensor | None = getattr(microbatch, "cu_seqlens", None)
        self._is_noting = False

    def begin(self, output: Any) -> None:
        """Record the calls that follow from the activation, the first tensor of the layers' output.

        A model without layers has none (`output` is None): then it is the micro-batch's first one.
        """
        tensors = tensors_of(self._microbatch if output is None else output)
        hidden = next((item for item in tensors if item.is_floating_point()), None)
        if self._num_samples and hidden is not None:
            self.recording = Recording(hidden)
            self.recording.__enter__()  # type: ignore[no-untyped-call]
            self._is_noting = True

    def end(self) -> None:
        """Stop recording."""
        if self._is_noting:
            assert self.recording is not None
            self.recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_noting = False

    def finds_meeting(
        self, loss: object, count: object, is_constant: Callable[[Tensor], bool] = is_parameter
    ) -> bool:
        """Whether the trial shows that the loss is neither a sum over samples nor a mean.

        Args:
            loss: What the step returned.
            count: The count that it averages over, if that is known.
            is_constant: Whether a tensor is known not to depend on the samples.
        """
        recording = self.recording
        number = None if recording is None else recording.number_of(loss)
        if recording is None or not recording.is_complete or not recording.depends(number):
            return False
        assert number is not None
        weight = recording.number_of(count)
        numbers = [number] if weight is None else [number, weight]
        num_samples = self._num_samples
        try:
            if num_samples == 1 and self._starts is None:
                if _takes_none(recording, numbers):
                    return True
                num_samples = 2
                if not recording.double(numbers):
                    return False
            groupings = sample_groupings(recording.source.shape, num_samples, self._starts)
            trial = _Trial(recording, numbers, groupings, is_doubled=self._num_samples == 1)
            by_places = self._num_samples > 1 or self._is_cut
            return trial.finds_meeting(by_places=by_places) or (
                by_places and trial.weighs_places(is_constant)
            )
        except Exception:
            # If functions can't be called again, for any reason, the trial finds nothing.
            return False


def _takes_none(recording: Recording, numbers: Sequence[int]) -> bool:
    """Whether a loss of one sample takes an empty slice written in the step, such as a half."""
    if recording.has_escaped:
        return False
    calls = recording.needed_for(numbers)
    chosen = (call for call in calls if call.takes_nothing and recording.depends(call.takes[0]))
    return any(isinstance(_place_of(call), slice) and not _rows_of_one(call) for call in chosen)


def _rows_of_one(call: Call) -> int:
    return torch.arange(1)[_place_of(call)].numel()


class _Trial:
    def __init__(
        self,
        recording: Recording,
        numbers: Sequence[int],
        groupings: list[tuple[int, Tensor]],
        *,
        is_doubled: bool,
    ) -> None:
        self._recording = recording
        self._is_doubled = is_doubled
        self._numbers = numbers
        self._groupings = groupings
        self._source = recording.source
        # Samples are mixed in scalars: coarser rounding before is the same for each sample alone.
        self._eps = max(call.rounding for call in recording.needed_for(numbers))

    def finds_meeting(self, *, by_places: bool) -> bool:
        if not self._groupings:
            return False
        base = self._value(self._source)
        meets = all(self._meets(base, dim, samples) for dim, samples in self._groupings)
        is_clear = by_places and len(self._groupings) == 1
        return meets or (is_clear and self._chooses_places(base, *self._groupings[0]))

    def _meets(self, base: Tensor, dim: int, samples: Tensor) -> bool:
        """Whether the loss isn't a sum over parts of the micro-batch."""
        for part, other in self._others(dim, samples):
            if part.all():
                continue
            changed = [self._value(self._put(other, dim, rows)) for rows in (part, ~part)]
            changed.append(self._value(other))
            first, second, both = (value - base for value in changed)
            allowed = _NEGLIGIBLE * (first.abs() + second.abs()) + self._rounding([base, *changed])
            if (both - first - second).abs() > allowed:  # False if one of them is NaN.
                return True
        return False

    def _others(self, dim: int, samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield masks of parts of the micro-batch, and other values for all of it."""
        count = int(samples.max()) + 1
        for seed in range(_NUM_TRIALS):
            part = _PARTS[seed % len(_PARTS)](samples, count)
            # Strong in one part and weak in the other, so that other samples have the largest loss.
            strong = part if seed < len(_PARTS) else ~part
            yield part, self._other(seed, torch.where(strong, _STRONG, _WEAK), dim)
        # The largest and the smallest of few samples may stay the same one in all of these.
        own, part = self._source, samples % 2 == 0
        for of_part, of_others in (_ALL_LARGER, _ALL_SMALLER):
            factors = _along(torch.where(part, of_part, of_others), dim, own).to(own)
            for values in (own, own.flip(dim), own.roll(1, dim), -own):
                yield part, values * factors

    def _chooses_places(self, base: Tensor, dim: int, samples: Tensor) -> bool:
        """Whether the loss leaves out samples because of their positions in the micro-batch."""
        count = int(samples.max()) + 1
        if dim != 0 or len(samples) != count or self._recording.has_escaped:
            return False
        kept, taken = torch.zeros(count, dtype=torch.bool), list(self._indexed(count))
        for places in taken:
            kept[places] = True
        # Several numbers may come from a list that tells which samples count.
        are_told = len({item for item in taken if isinstance(item, int)}) > 1
        if kept.all() or not kept.any() or are_told:
            return False
        other = self._other(0, torch.full((count,), _STRONG), 0)
        changes = [(self._value(self._put(other, 0, rows)) - base).abs() for rows in (~kept, kept)]
        # If all targets are ignored, the loss depends on no sample, whatever its position.
        allowed = self._rounding([base])
        return bool((changes[0] <= allowed) & (changes[1] > allowed) & base.isfinite())

    def weighs_places(self, is_constant: Callable[[Tensor], bool]) -> bool:
        """Whether the loss weighs samples by their positions.

        If samples are permuted with all tensors that belong to them, the loss changes only by
        constants that depend on positions, and not at all if these are permuted, too. Constants
        that are used as indices stay.
        """
        dim, samples = self._groupings[0] if len(self._groupings) == 1 else (1, torch.empty(0))
        count, recording = len(samples), self._recording
        if dim != 0 or len(set(samples.tolist())) != count:
            return False
        if self._is_doubled:
            recording.count_two()
        own = recording.leaves_where(lambda leaf: not (is_parameter(leaf) or is_constant(leaf)))
        # Also those made before the layers, if they have one element per sample.
        counting = recording.counting() | recording.leaves_where(
            lambda leaf: len(leaf.shape) > 0 and len(leaf) == count and not is_parameter(leaf)
        ).difference(own)

        def move(_: Call, number: int, value: Tensor) -> Tensor:
            are_rows = number in own and value.ndim > 0 and len(value) % count == 0
            return value.roll(len(value) // count, 0) if are_rows else value

        def move_all(call: Call, number: int, value: Tensor) -> Tensor:
            meets_samples = number in counting and not counting.issuperset(call.results)
            if meets_samples and value.shape[:1] == (count,) and call.name not in _TAKING_ROWS:
                return value.roll(1, 0)
            return move(call, number, value)

        if not any(counting.intersection(c.takes) for c in recording.needed_for(self._numbers)):
            return False
        source = self._other(0, torch.where(samples == 0, _STRONG, _WEAK), 0)
        base = self._value(source)
        moved, with_all = (self._value(source.roll(1, 0), item) for item in (move, move_all))
        allowed = _NEGLIGIBLE * base.abs() + self._rounding([base, moved, with_all])
        return bool(((moved - base).abs() > allowed) & ((with_all - base).abs() <= allowed))

    def _indexed(self, count: int) -> Iterator[int | slice]:
        """Yield the indices by which the loss takes samples, as written in the step."""
        for call in self._recording.needed_for(self._numbers):
            taken = _place_of(call)
            # With one sample a loop over all samples takes the first, too.
            is_meant = call.is_written or not self._is_doubled
            if taken is not None and is_meant and self._recording.depends(call.takes[0]):
                places = torch.arange(count)[taken]
                if places.numel() < count:
                    yield taken

    def _other(self, seed: int, strength: Tensor, dim: int) -> Tensor:
        """Return other values of the activation: its rows permuted, each times a random factor.

        Args:
            seed: Seed of the random numbers.
            strength: A further factor for each index of `dim`.
            dim: The dim along which `strength` lies.
        """
        source = self._source
        generator = torch.Generator().manual_seed(seed)
        rows = source.reshape(-1, source.shape[-1])
        order = torch.randperm(len(rows), generator=generator)
        factors = 0.5 + 1.5 * torch.rand(len(rows), 1, generator=generator)
        factors *= torch.randint(2, (len(rows), 1), generator=generator) * 2 - 1
        other = (rows[order.to(source.device)] * factors.to(source)).reshape(source.shape)
        return other * _along(strength, dim, source).to(source)

    def _put(self, other: Tensor, dim: int, places: Tensor) -> Tensor:
        """Return the activation with the values of `other` where a mask along `dim` is true."""
        return torch.where(_along(places, dim, other), other, self._source)

    def _value(self, source: Tensor, change: Change | None = None) -> Tensor:
        """Return the loss times its count, if known; for `change` see `Recording.replay`."""
        values = self._recording.replay(source, self._numbers, change)
        return torch.stack([item.detach().double().reshape(()) for item in values]).prod()

    def _rounding(self, values: Sequence[Tensor]) -> Tensor:
        largest = torch.stack(list(values)).abs().amax()
        return _ROUNDINGS * self._eps * largest


def _along(values: Tensor, dim: int, like: Tensor) -> Tensor:
    """Return values, one for each index of a dim, in a shape that broadcasts."""
    shape = [1] * like.ndim
    shape[dim] = len(values)
    return values.to(like.device).view(shape)


def _place_of(call: Call) -> int | slice | None:
    """Return the index or slice, given as numbers, by which a call takes rows; None without one."""
    if call.name not in ("getitem", "select", "narrow"):
        return None
    if call.name == "getitem":
        index = call.args[1]
        first = index[0] if isinstance(index, tuple) and index else index
        is_value = isinstance(first, Value | bool)
        return first if isinstance(first, int | slice) and not is_value else None
    dim, *rest = call.args[1:]
    if dim != 0 or not all(isinstance(item, int) for item in rest):
        return None
    return rest[0] if call.name == "select" else slice(rest[0], sum(rest))
