"""Find out by trial whether an optimizer steps slices as it steps whole parameters.

An element-wise optimizer (SGD, Adam, ...) does the same to a slice as to the whole. One that
orthogonalises a matrix, or keeps a factor for each row and column, would run on a slice without an
error, but train differently; so would one that computes a number of all parameters, if these have
several owners. No list of names is sure to have all of them. So a copy of each optimizer, with its
own options, makes a few steps on small tensors, on fewer of them and on pieces of them, on the
rank's device.

An owner and its standby need more: they must step the rows that they have in common alike, bit for
bit. Random numbers, and kernels whose vectorised and remaining elements round differently (SGD's
with `fused=True` on CPUs), let copies drift apart.
"""

import warnings
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.owners import list_owners
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["Likeness", "Trial", "check_steps", "try_steps"]

_NUM_STEPS = 4
_SHAPES: dict[frozenset[int], tuple[tuple[int, ...], ...]] = {
    frozenset({1}): ((203,), (67,)),
    frozenset({2}): ((141, 131), (67, 3), (61, 5)),
    frozenset({1, 2}): ((141, 131), (67, 3), (203,)),
}
"""Tensors for a group, by the dims of its parameters; no sizes are multiples of a vector's.

The first matrix is so large that optimizers which treat small ones otherwise show it.
"""
_LEAST_RATE = 1e-2
"""Learning rates are raised to this, else updates might get lost in rounding."""
_SCALE = 0.02
"""Of the values that are stepped: as small as weights, so that bf16 keeps most of an update."""
_WIDE = {torch.float32, torch.float64}
_CLOSE = 1e-3
"""By which part of the greatest update two steps may differ that are meant to be the same."""

_Parts = Callable[[list[Tensor]], list[Tensor]]


class Likeness(IntEnum):
    """How a step of some tensors, or pieces, goes with the step of all."""

    DIFFERENT = 0
    CLOSE = 1
    """The same but for rounding."""
    EXACT = 2


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a trial has shown of an optimizer on this rank."""

    fewer: Likeness = Likeness.EXACT
    """How it steps a tensor without the others."""
    pieces: Likeness = Likeness.EXACT
    """How it steps rows of a tensor without the others; exact if that isn't tried."""
    num_losses: float = 1.0
    """How often it evaluates the loss in a step."""
    digest: int = 0
    """Digest of the steps' results, which must be the same on the ranks of a pair."""
    error: str | None = None
    """Why it can't be tried."""


def check_steps(optimizers: Sequence[Optimizer], store: SliceStore, comms: Communicators) -> None:
    """Refuse optimizers that would step slices, or their standbys, otherwise; collective.

    Args:
        optimizers: Those of the run.
        store: Has the slices.
        comms: The communicators.

    Raises:
        ConfigurationError: An optimizer is refused, or devices round differently; on every rank.
    """
    cut = [name for name, items in store.slices.items() if len(items) > 1]
    own = [_try(optimizer, is_cut=bool(cut)) for optimizer in optimizers]
    everyone = comms.gather_objects(own)
    owners = {item.owner for items in store.slices.values() for item in items}
    for index, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        for rank, trials in enumerate(everyone):
            refusal = _refusal_of(trials[index], cut, len(owners), has_standbys=store.has_standbys)
            if refusal is not None:
                raise ConfigurationError(f"{name} {refusal} (Found on rank {rank}.)")
        if own[index].error is not None and len(owners) > 1 and comms.global_rank == 0:
            warnings.warn(
                f"{name} can't be tried on small tensors ({own[index].error}), so nobody knows "
                "whether it steps slices as whole parameters. Element-wise optimizers do.",
                stacklevel=2,
            )
    for owner, standby in _pairs_of(store):
        if everyone[owner] != everyone[standby]:
            raise ConfigurationError(
                f"Ranks {owner} and {standby} would keep the same slices, but their devices "
                "round an optimizer's step differently. Use redundancy=0, or give ranks of one "
                "kind of device to two nodes, so that they stand by for each other."
            )


def _pairs_of(store: SliceStore) -> list[tuple[int, int]]:
    pairs = {
        (item.owner, item.standby)
        for _, items in list_owners(store.slices)
        for item in items
        if item.standby is not None
    }
    return sorted(pairs)


def _refusal_of(
    trial: Trial, cut: Sequence[str], num_owners: int, *, has_standbys: bool
) -> str | None:
    """Return why an optimizer can't step a run's slices, `cut` in several; None if it can."""
    if trial.num_losses > 1:
        return (
            "evaluates the loss several times a step, where an iteration evaluates it once. Choose "
            "another optimizer, such as AdamW."
        )
    if num_owners > 1 and trial.fewer is Likeness.DIFFERENT:
        return (
            f"computes with all parameters at once, but {num_owners} ranks own slices of them. "
            "Choose an element-wise optimizer, such as AdamW."
        )
    if trial.pieces is Likeness.DIFFERENT:
        return (
            "needs whole matrices: it steps the rows of a tensor otherwise if there are more of "
            f"them, but {len(cut)} parameters are cut into slices with several owners, such as "
            f'{cut[0]}. Use HeteroStrategy(ownership="parameter"), which gives each parameter '
            "one owner, or an element-wise optimizer, such as AdamW."
        )
    if has_standbys and trial.error is not None:
        return (
            "can't be tried on small tensors, so nobody knows whether a slice and its standby "
            f"would stay equal ({trial.error}). Use an element-wise optimizer, or redundancy=0."
        )
    if has_standbys and min(trial.fewer, trial.pieces) is not Likeness.EXACT:
        return (
            "rounds the rows of a tensor otherwise if there are more of them (or more tensors), so "
            "a slice and its standby would differ. Use another optimizer, such as AdamW, or "
            "redundancy=0. Where it has fused=True, fused=False may do."
        )
    return None


def _try(optimizer: Optimizer, *, is_cut: bool) -> Trial:
    try:
        with PreservedRandomState(), torch.no_grad():
            return try_steps(optimizer, is_cut=is_cut)
    except Exception as error:
        return Trial(error=f"{type(error).__name__}: {error}")


def try_steps(optimizer: Optimizer, *, is_cut: bool) -> Trial:
    """Return how an optimizer steps parts of tensors.

    Args:
        optimizer: It isn't changed, nor its parameters.
        is_cut: Whether to try on rows of tensors, too, not only on fewer of them.

    Raises:
        ValueError: Its steps change nothing.
    """
    tries = _Tries(optimizer, _draw_all(optimizer))
    if any(torch.equal(first, last) for first, last in tries.whole):
        raise ValueError("a step changes nothing")
    kinds = {tensor.dtype for group in tries.drawn for tensor in group[0]}
    # Fewer digits would hide what a step makes of a norm.
    wide = None if kinds <= _WIDE else _Tries(optimizer, _draw_all(optimizer, torch.float32))

    def judge(parts: _Parts) -> Likeness:
        found = tries.compare(parts)
        if found is Likeness.EXACT or wide is None:
            return found
        return min(Likeness.CLOSE, wide.compare(parts))

    return Trial(
        fewer=judge(_fewer),
        pieces=min(judge(_from_start), judge(_from_third)) if is_cut else Likeness.EXACT,
        num_losses=tries.num_losses,
        digest=zlib.crc32(b"".join(_bytes_of(last for _, last in tries.whole))),
    )


class _Tries:
    """Steps of a copy of an optimizer, on tensors and on parts of them."""

    def __init__(self, optimizer: Optimizer, drawn: list[list[list[Tensor]]]) -> None:
        self.drawn = drawn
        self._optimizer = optimizer
        self.whole, self.num_losses = _run(optimizer, drawn, lambda tensors: tensors)

    def compare(self, parts: _Parts) -> Likeness:
        """Return how the steps of parts go with those of all."""
        found, _ = _run(self._optimizer, self.drawn, parts)
        before, expected = (
            _of_groups(self.drawn, items, parts) for items in zip(*self.whole, strict=True)
        )
        return min(map(_compare, [last for _, last in found], before, expected))


def _of_groups(
    drawn: Sequence[Sequence[list[Tensor]]], tensors: Iterable[Tensor], parts: _Parts
) -> list[Tensor]:
    """Return the parts of each group's tensors, of which there are as many as were drawn."""
    left = iter(tensors)
    groups = [list(islice(left, len(values))) for values, *_ in drawn]
    return [part for group in groups for part in parts(group)]


def _compare(found: Tensor, before: Tensor, expected: Tensor) -> Likeness:
    """Compare values after some steps with those that are expected."""
    if torch.equal(found, expected):
        return Likeness.EXACT
    update = (expected.double() - before.double()).abs().max()
    rounding = _NUM_STEPS * torch.finfo(expected.dtype).eps * expected.double().abs().max()
    error = (found.double() - expected.double()).abs().max()
    is_close = bool(error <= _CLOSE * update + rounding)
    return Likeness.CLOSE if is_close else Likeness.DIFFERENT


def _from_start(tensors: list[Tensor]) -> list[Tensor]:
    """Return the rows of a slice that is shorter."""
    return [tensor[: -max(9, len(tensor) // 20)] for tensor in tensors]


def _from_third(tensors: list[Tensor]) -> list[Tensor]:
    """Return the rows of a slice that begins elsewhere."""
    return [tensor[3:] for tensor in tensors]


def _fewer(tensors: list[Tensor]) -> list[Tensor]:
    return tensors[1:]


def _bytes_of(tensors: Iterable[Tensor]) -> Iterable[bytes]:
    return (t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def _draw_all(optimizer: Optimizer, dtype: torch.dtype | None = None) -> list[list[list[Tensor]]]:
    """Return, for each group with parameters, tensors and a gradient of each for every step."""
    generator, drawn = torch.Generator().manual_seed(0), []
    for group in _groups_of(optimizer):
        like = torch.empty_like(group["params"][0], dtype=dtype), _SHAPES[_dims_of(group)]
        values = [_SCALE * item for item in _draw(generator, *like)]
        direction = _draw(generator, *like)
        # They go one way on the whole, as in training: some optimizers compare them.
        noisy = [
            [item + 0.5 * noise for item, noise in zip(direction, noises, strict=True)]
            for noises in (_draw(generator, *like) for _ in range(_NUM_STEPS))
        ]
        drawn.append([values, *noisy])
    return drawn


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def _dims_of(group: dict[str, Any]) -> frozenset[int]:
    return frozenset(min(max(item.ndim, 1), 2) for item in group["params"])


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _run(
    optimizer: Optimizer, drawn: Sequence[Sequence[list[Tensor]]], parts: _Parts
) -> tuple[list[tuple[Tensor, Tensor]], float]:
    """Return each parameter before and after some steps of a copy; and losses in a step."""
    copy, groups, num_losses = _copy_of(optimizer), [], 0
    for group, (values, *gradients) in zip(_groups_of(optimizer), drawn, strict=True):
        options = deepcopy(_options_of(group))
        if isinstance(options.get("lr"), float | int):
            options["lr"] = max(options["lr"], _LEAST_RATE)
        items = [nn.Parameter(tensor) for tensor in parts(_copies(values))]
        copy.param_groups.append({**options, "params": items})
        copy.state.update({item: state for item in items if (state := _begun(optimizer, item))})
        groups.append((gradients, items))
    everything = [item for _, items in groups for item in items]
    _hand_over(optimizer, copy, everything)
    first = [item.detach().clone() for item in everything]

    def closure() -> Tensor:
        nonlocal num_losses
        num_losses += 1
        return first[0].new_ones(())

    for step in range(_NUM_STEPS):
        for gradients, items in groups:
            for item, gradient in zip(items, parts(_copies(gradients[step])), strict=True):
                item.grad = gradient
        copy.step(closure)
    last = [item.detach() for item in everything]
    return list(zip(first, last, strict=True)), num_losses / _NUM_STEPS


def _hand_over(optimizer: Optimizer, copy: Any, parameters: list[nn.Parameter]) -> None:
    """Let a copy that keeps a list of its parameters, as LBFGS does, keep its own."""
    known = set(map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups)))
    for name, value in vars(optimizer).items():
        if isinstance(value, list) and value and known.issuperset(map(id, value)):
            setattr(copy, name, parameters)


def _draw(
    generator: torch.Generator, like: Tensor, shapes: Iterable[tuple[int, ...]]
) -> list[Tensor]:
    return [torch.randn(shape, generator=generator).to(like) for shape in shapes]


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _begun(optimizer: Optimizer, item: Tensor) -> dict[str, Any]:
    """Return an optimizer's initial state, such as Adagrad's, in the shape of another tensor."""
    state: dict[str, Any] = {}
    for own, values in optimizer.state.items():
        for key, value in values.items() if own.ndim and own.numel() else ():
            is_like = isinstance(value, Tensor) and value.shape == own.shape
            state[key] = (
                torch.full_like(item, value.flatten()[0].item()) if is_like else deepcopy(value)
            )
        if state:
            break
    return state


def _copy_of(optimizer: Optimizer) -> Any:
    """Return an optimizer of the same kind without parameters, state, hooks and schedulers."""
    copy: Any = object.__new__(type(optimizer))
    hooks = [name for name in vars(optimizer) if name.endswith("_hooks")]
    vars(copy).update(deepcopy(_kept_of(optimizer)), state=defaultdict(dict), param_groups=[])
    vars(copy).update({name: OrderedDict() for name in hooks})
    return copy


def _kept_of(optimizer: Optimizer) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("state", "param_groups", "step") and not name.endswith("_hooks")
    }
