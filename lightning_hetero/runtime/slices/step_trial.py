"""Find out by trial whether an optimizer steps slices as it steps whole parameters.

An element-wise optimizer (SGD, Adam, ...) does the same to a slice as to the whole parameter. One
that orthogonalises a matrix, keeps a factor for each row and column, or computes a number from all
parameters would run on slices without an error but train differently. So a copy of each optimizer,
with its own options, makes a few steps on the rank's device: on small tensors, on only some of
them, and on pieces of them.

An owner and its standby must even step their common rows alike, bit for bit. Their copies would
drift apart by random numbers, and by kernels that round vectorised and remaining elements
differently (SGD with `fused=True` on CPUs).
"""

import warnings
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.exchange.owners import list_owners
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import SliceStore

_NUM_STEPS = 4
_SHAPES: dict[frozenset[int], tuple[tuple[int, ...], ...]] = {
    frozenset({1}): ((203,), (67,)),
    frozenset({2}): ((141, 131), (67, 3), (61, 5)),
    frozenset({1, 2}): ((141, 131), (67, 3), (203,)),
}
"""Shapes to try for a group, by the number of dims of its parameters.

No size is a multiple of a vector's length. The first matrix is large, since some optimizers treat
large and small ones differently.
"""
_LEAST_RATE = 1e-2
"""Smaller learning rates are raised to this, so that updates aren't lost in rounding."""
_SCALE = 0.02
"""Size of the values that are stepped: about that of weights."""
_CLOSE = 1e-3
"""Largest difference between two steps that count as the same, as a share of the largest update."""

_Parts = Callable[[list[Tensor]], list[Tensor]]


class Likeness(IntEnum):
    """How well the step of a part of the tensors agrees with the step of all of them."""

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
    """Refuse optimizers that would step slices, or standbys' copies, differently.

    Called by all ranks.

    Raises:
        ConfigurationError: On every rank, if an optimizer is refused or devices round differently.
    """
    # Lightning stands in for a `configure_optimizers` that returns None with one without groups.
    optimizers = [item for item in optimizers if item.param_groups]
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
    pairs = {
        (item.owner, item.standby)
        for _, items in list_owners(store.slices)
        for item in items
        if item.standby is not None
    }
    for owner, standby in sorted(pairs):
        if everyone[owner] != everyone[standby]:
            raise ConfigurationError(
                f"Ranks {owner} and {standby} would keep the same slices, but their devices "
                "round an optimizer's step differently. Use redundancy=0, or give ranks of one "
                "kind of device to two nodes, so that they stand by for each other."
            )


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
        optimizer: The optimizer, which isn't changed.
        is_cut: Whether to try rows of tensors, too, and not only some of the tensors.
    """
    drawn = _draw(optimizer)
    whole, num_losses = _run(optimizer, drawn, lambda tensors: tensors)
    if any(map(torch.equal, _all_of(whole), _all_of([values for values, *_ in drawn]))):
        raise ValueError("a step changes nothing")

    def judge(parts: _Parts) -> Likeness:
        found, _ = _run(optimizer, drawn, parts)
        before = [parts(values) for values, *_ in drawn]
        expected = [parts(values) for values in whole]
        return min(map(_compare, _all_of(found), _all_of(before), _all_of(expected)))

    return Trial(
        fewer=judge(lambda tensors: tensors[1:]),
        # The rows of a slice that is shorter, and of one that starts elsewhere.
        pieces=min(
            judge(lambda tensors: [t[: -max(9, len(t) // 20)] for t in tensors]),
            judge(lambda tensors: [t[3:] for t in tensors]),
        )
        if is_cut
        else Likeness.EXACT,
        num_losses=num_losses,
        digest=zlib.crc32(b"".join(item.cpu().numpy().tobytes() for item in _all_of(whole))),
    )


def _all_of(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [tensor for tensors in groups for tensor in tensors]


def _compare(found: Tensor, before: Tensor, expected: Tensor) -> Likeness:
    """Compare values after some steps with those that are expected."""
    if torch.equal(found, expected):
        return Likeness.EXACT
    update = (expected.double() - before.double()).abs().max()
    rounding = _NUM_STEPS * torch.finfo(expected.dtype).eps * expected.double().abs().max()
    error = (found.double() - expected.double()).abs().max()
    is_close = bool(error <= _CLOSE * update + rounding)
    return Likeness.CLOSE if is_close else Likeness.DIFFERENT


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def _draw(optimizer: Optimizer) -> list[list[list[Tensor]]]:
    """Return, for each group with parameters, tensors and a gradient of each for every step.

    At least in fp32: with fewer digits the effect of a norm on a step might not be seen.
    """
    generator, drawn = torch.Generator().manual_seed(0), []
    for group in _groups_of(optimizer):
        like = group["params"][0]
        dtype = torch.promote_types(like.dtype, torch.float32)
        shapes = _SHAPES[frozenset(min(max(item.ndim, 1), 2) for item in group["params"])]
        values, direction, *noises = (
            [torch.randn(shape, generator=generator).to(like.device, dtype) for shape in shapes]
            for _ in range(2 + _NUM_STEPS)
        )
        # All steps' gradients point roughly one way, as in training: some optimizers need that.
        gradients = [
            [item + 0.5 * noise for item, noise in zip(direction, row, strict=True)]
            for row in noises
        ]
        drawn.append([[_SCALE * item for item in values], *gradients])
    return drawn


def _run(
    optimizer: Optimizer, drawn: Sequence[Sequence[list[Tensor]]], parts: _Parts
) -> tuple[list[list[Tensor]], float]:
    """Return each group's parts after some steps of a copy; and how many losses a step takes."""
    items = [[nn.Parameter(t.clone()) for t in parts(values)] for values, *_ in drawn]
    copy, num_losses = _copy_of(optimizer, items), 0

    def closure() -> Tensor:
        nonlocal num_losses
        num_losses += 1
        return items[0][0].new_ones(())

    for step in range(_NUM_STEPS):
        for group, (_, *gradients) in zip(items, drawn, strict=True):
            for item, gradient in zip(group, parts(gradients[step]), strict=True):
                item.grad = gradient.clone()
        copy.step(closure)
    return [[item.detach() for item in group] for group in items], num_losses / _NUM_STEPS


def _copy_of(optimizer: Optimizer, items: Sequence[list[nn.Parameter]]) -> Any:
    """Return an optimizer of the same kind and options with other parameters for each group.

    It has no hooks and schedulers. Its initial state, such as Adagrad's, has their shapes.
    """
    copy: Any = object.__new__(type(optimizer))
    memo: dict[int, Any] = {}
    state: dict[Tensor, dict[str, Any]] = defaultdict(dict)
    groups = _groups_of(optimizer)
    for group, own in zip(groups, items, strict=True):
        # Where the optimizer's attributes refer to parameters or groups, the copy's do as well.
        memo[id(group["params"])] = own
        memo |= {id(parameter): own[0] for parameter in group["params"]}
    begun = [(item, values) for item, values in optimizer.state.items() if item.numel()]
    for parameter, values in begun[:1]:
        for item in _all_of(items):
            state[item] = {key: _begun(value, parameter, item) for key, value in values.items()}
    hooks = [name for name in vars(optimizer) if name.endswith("_hooks")]
    left_out = {"state", "step", "param_groups", *hooks}
    kept = {name: value for name, value in vars(optimizer).items() if name not in left_out}
    vars(copy).update(deepcopy(kept, memo), state=state, param_groups=deepcopy(groups, memo))
    vars(copy).update({name: OrderedDict() for name in hooks})
    for group in copy.param_groups:
        if isinstance(group.get("lr"), float | int):
            group["lr"] = max(group["lr"], _LEAST_RATE)
    return copy


def _begun(value: Any, parameter: Tensor, item: Tensor) -> Any:
    """Return a value of a parameter's state, adapted to another parameter."""
    if isinstance(value, Tensor) and value.ndim and value.shape == parameter.shape:
        return torch.full_like(item, value.flatten()[0].item())
    return deepcopy(value)
