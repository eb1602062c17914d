"""Find out by trial whether samples meet each other in a loss, or are chosen by their places.

The rules of `reductions` know what torch's functions do by their names. This looks at numbers: with
h the activation that the layers return and h' one with other values, the samples of a part S of the
micro-batch add to the loss f on their own exactly if

    f(h) - f(h' in S) - f(h' outside of S) + f(h') = 0

for every S, where f is the loss times what it averages over. It holds for sums and means over
samples, masked or not, and for nothing in which a sample of S meets one outside of it: pairs made
by hand, statistics, the hardest samples. A loss that leaves samples out by their places, such as
the first row, is found by what it doesn't depend on. One that weighs them by their places is
another one if samples change places, and the same again if constants go with them.

The functions are called again on other activations, the step is not. A micro-batch of one sample is
tried as if it held that sample twice. Where functions can't be called again nothing is found, and
the rules alone judge.
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
"""The same in roundings of the loss itself."""
_STRONG, _WEAK = 8.0, 0.5
"""Factors of other values."""
_ALL_LARGER, _ALL_SMALLER = (8.0, 4.0), (0.5, 0.25)
"""The same where they are the samples' own values: no sample is like it was then."""
_PARTS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda samples, count: samples < count // 2,
    lambda samples, count: samples % 2 == 0,
    lambda samples, count: samples // 2 % 2 == 0,
)
"""Samples of a part: between them they separate halves, neighbours and pairs of neighbours."""
_TAKING_ROWS = {"getitem", "index_select", "gather", "take_along_dim", "take", "index_put"}
"""Functions that take numbers for places."""


class LossTrials:
    """The iterations whose losses are tried: the first one, and few later ones.

    A trial takes several times as long as the loss. What the first one has found needn't be found
    again where ranks are lost or come: their code is the same.
    """

    def __init__(self) -> None:
        self.is_known = False
        """Whether an iteration whose loss was tried has ended."""
        self._is_under_way = False

    def begin(self, batch_idx: int) -> bool:
        """Return whether the loss of an iteration that begins is tried."""
        self.is_known |= self._is_under_way  # What a trial finds ends the run.
        self._is_under_way = not self.is_known
        return self._is_under_way or is_looked_at(batch_idx + 1)


class LossTrial:
    """The trial of one micro-batch's loss.

    Args:
        microbatch: What the step gets. If samples are packed end to end it says where each begins,
            and where the last one ends, in `cu_seqlens`.
        num_samples: Of the micro-batch; 0 if nobody knows.
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
        """Note what is made of the activation, the first tensor that the last layer returned.

        Of a model without layers, which has none, it is the micro-batch's first tensor of numbers.
        """
        tensors = tensors_of(self._microbatch if output is None else output)
        hidden = next((item for item in tensors if item.is_floating_point()), None)
        if self._num_samples and hidden is not None:
            self.recording = Recording(hidden)
            self.recording.__enter__()  # type: ignore[no-untyped-call]
            self._is_noting = True

    def end(self) -> None:
        """Note no more."""
        if self._is_noting:
            assert self.recording is not None
            self.recording.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._is_noting = False

    def finds_meeting(
        self, loss: object, count: object, is_constant: Callable[[Tensor], bool] = is_parameter
    ) -> bool:
        """Whether the loss is known to be no sum over samples, nor a mean over `count`.

        Args:
            loss: What the step returned.
            count: What it averages over, if that is known.
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
            # What can't be called again, whatever the reason, tells nothing: no reason to end.
            return False


def _takes_none(recording: Recording, numbers: Sequence[int]) -> bool:
    """Whether a loss takes no sample of one by numbers written in the step, as a half of it."""
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
        # Samples meet in single numbers: what is coarser before is as coarse for each alone.
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
            if (both - first - second).abs() > allowed:  # Never, if one of them is no number.
                return True
        return False

    def _others(self, dim: int, samples: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield parts of the micro-batch, and other values for all of it."""
        count = int(samples.max()) + 1
        for seed in range(_NUM_TRIALS):
            part = _PARTS[seed % len(_PARTS)](samples, count)
            # Much in one part and little in the other: then others are the largest losses.
            strong = part if seed < len(_PARTS) else ~part
            yield part, self._other(seed, torch.where(strong, _STRONG, _WEAK), dim)
        # The largest and the smallest of few samples may stay the same one in all of these.
        own, part = self._source, samples % 2 == 0
        for of_part, of_others in (_ALL_LARGER, _ALL_SMALLER):
            factors = _along(torch.where(part, of_part, of_others), dim, own).to(own)
            for values in (own, own.flip(dim), own.roll(1, dim), -own):
                yield part, values * factors

    def _chooses_places(self, base: Tensor, dim: int, samples: Tensor) -> bool:
        """Whether the loss leaves samples out because of where they are in the micro-batch."""
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
        # Where all targets are ignored it depends on nothing, wherever that is.
        allowed = self._rounding([base])
        return bool((changes[0] <= allowed) & (changes[1] > allowed) & base.isfinite())

    def weighs_places(self, is_constant: Callable[[Tensor], bool]) -> bool:
        """Whether samples count more or less in the loss because of where they are.

        If all that is a sample's changes places with it, only numbers that count places can make
        the loss another one; it is what it was if these change places, too. Those by which
        rows are taken stay.
        """
        dim, samples = self._groupings[0] if len(self._groupings) == 1 else (1, torch.empty(0))
        count, recording = len(samples), self._recording
        if dim != 0 or len(set(samples.tolist())) != count:
            return False
        if self._is_doubled:
            recording.count_two()
        own = recording.leaves_where(lambda leaf: not (is_parameter(leaf) or is_constant(leaf)))
        # Those that were made before the layers, too: another length has another meaning.
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
        """Yield the places of samples that the loss takes by numbers written in the step."""
        for call in self._recording.needed_for(self._numbers):
            taken = _place_of(call)
            # Of one sample a loop over all takes the first, too.
            is_meant = call.is_written or not self._is_doubled
            if taken is not None and is_meant and self._recording.depends(call.takes[0]):
                places = torch.arange(count)[taken]
                if places.numel() < count:
                    yield taken

    def _other(self, seed: int, strength: Tensor, dim: int) -> Tensor:
        """Return other values: those of other places, each times a number of its own.

        Args:
            seed: Of what is drawn.
            strength: Of those numbers, at each place of a dim.
            dim: That dim.
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
        """Return the activation with another's values at places of a dim."""
        return torch.where(_along(places, dim, other), other, self._source)

    def _value(self, source: Tensor, change: Change | None = None) -> Tensor:
        """Return the loss times what it averages over; for `change` see `Recording.replay`."""
        values = self._recording.replay(source, self._numbers, change)
        return torch.stack([item.detach().double().reshape(()) for item in values]).prod()

    def _rounding(self, values: Sequence[Tensor]) -> Tensor:
        largest = torch.stack(list(values)).abs().amax()
        return _ROUNDINGS * self._eps * largest


def _along(values: Tensor, dim: int, like: Tensor) -> Tensor:
    """Return values, one for each place of a dim, in a form that broadcasts."""
    shape = [1] * like.ndim
    shape[dim] = len(values)
    return values.to(like.device).view(shape)


def _place_of(call: Call) -> int | slice | None:
    """Return which rows a call takes by a number, or by a slice of numbers."""
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
