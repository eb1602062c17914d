"""Find out by trial whether an optimizer steps a slice and its copy alike, bit for bit.

An owner and its standby keep some rows in common, and each keeps other rows besides. If a row's
step depends on other rows, the copies drift apart: by a norm over the tensor, by random numbers,
and even by kernels whose vectorised and remaining elements round differently (SGD's with
`fused=True` on CPUs). No list of names is sure to have all of them. So a copy of the optimizer,
with its own options, makes a few steps on small tensors and on pieces of them, on the rank's
device. It is refused if results differ, or if it can't be tried.
"""

import pickle
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.owners import list_owners
from lightning_hetero.runtime.random_state import PreservedRandomState
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.slices.weights import SliceStore

__all__ = ["Verdict", "check_steps_alike", "try_steps"]

_NUM_STEPS = 4
_SHAPES: dict[frozenset[int], tuple[tuple[int, ...], ...]] = {
    frozenset({1}): ((203,), (67,)),
    frozenset({2}): ((67, 3), (61, 5)),
    frozenset({1, 2}): ((67, 3), (203,)),
}
"""Two tensors for a group, by the dims of its parameters; no sizes are multiples of a vector's."""
_PIECES: tuple[slice, ...] = (slice(0, 58), slice(3, None))
"""Rows of a slice that is shorter, and of one that begins elsewhere."""

_Parts = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a trial has shown of an optimizer on this rank."""

    refusal: str | None
    """Why the optimizer can't have standbys; None if it can."""
    digest: int
    """Digest of the steps' results, which must be the same on the ranks of a pair."""


def check_steps_alike(
    optimizers: Sequence[Optimizer],
    store: SliceStore,
    comms: Communicators,
    known: dict[bytes, Verdict],
) -> None:
    """Refuse optimizers whose steps differ between a slice and its standby; collective.

    Args:
        optimizers: Those of the run.
        store: Has the slices.
        comms: The communicators.
        known: Verdicts of earlier generations, by `_digest_of` their optimizers; new ones are
            added.

    Raises:
        ConfigurationError: An optimizer is refused, or devices round differently; on every rank.
    """
    is_cut = any(len(items) > 1 for items in store.slices.values())
    own = [_judge(optimizer, known, is_cut=is_cut) for optimizer in optimizers]
    everyone = comms.gather_objects(own)
    for rank, verdicts in enumerate(everyone):
        for verdict in verdicts:
            if verdict.refusal is not None:
                raise ConfigurationError(f"{verdict.refusal} (Found on rank {rank}.)")
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


def _judge(optimizer: Optimizer, known: dict[bytes, Verdict], *, is_cut: bool) -> Verdict:
    key = _digest_of(optimizer, is_cut=is_cut)
    if key is None:
        return _try(optimizer, is_cut=is_cut)
    if key not in known:
        known[key] = _try(optimizer, is_cut=is_cut)
    return known[key]


def _digest_of(optimizer: Optimizer, *, is_cut: bool) -> bytes | None:
    """Return a digest of all that a trial depends on, None if it has state or can't be pickled."""
    if optimizer.state:
        return None
    groups = [
        (_options_of(group), _dims_of(group), group["params"][0].dtype, group["params"][0].device)
        for group in _groups_of(optimizer)
    ]
    try:
        told = pickle.dumps((type(optimizer), _kept_of(optimizer), groups, is_cut))
        return sha256(told).digest()  # Hashed: it may hold tensors, and is kept for the run.
    except Exception:  # A user's optimizer may hold objects that can't be pickled.
        return None


def _try(optimizer: Optimizer, *, is_cut: bool) -> Verdict:
    name = type(optimizer).__name__
    remedy = (
        'Use an element-wise optimizer, such as AdamW, HeteroStrategy(ownership="parameter"), '
        "which gives each parameter whole to two ranks, or redundancy=0."
        if is_cut
        else "Use an element-wise optimizer, such as AdamW, or redundancy=0."
    )
    try:
        with PreservedRandomState(), torch.no_grad():
            digest = try_steps(optimizer, is_cut=is_cut)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        text = f"{name} can't be tried on small tensors, so nobody knows whether a slice and its"
        return Verdict(refusal=f"{text} standby would stay equal ({reason}). {remedy}", digest=0)
    refusal = None
    if digest is None:
        refusal = (
            f"{name} steps the rows of a tensor otherwise if there are more of them (or more "
            f"tensors), so a slice and its standby would differ. {remedy} Where it has "
            "fused=True, fused=False may do."
        )
    return Verdict(refusal=refusal, digest=digest or 0)


def try_steps(optimizer: Optimizer, *, is_cut: bool) -> int | None:
    """Return a digest of a few steps' results, None if pieces of tensors are stepped differently.

    Args:
        optimizer: It isn't changed, nor its parameters.
        is_cut: Whether to try on rows of tensors, or only on fewer of them.

    Raises:
        ValueError: Its steps change nothing.
    """
    drawn = _draw_all(optimizer)
    whole = _run(optimizer, drawn, lambda tensors: tensors)
    if any(torch.equal(first, last) for first, last in whole):
        raise ValueError("a step changes nothing")
    results = [last for _, last in whole]
    trials: list[_Parts] = [_fewer]
    if is_cut:
        trials += [partial(_piece, rows) for rows in _PIECES]
    for parts in trials:
        found = [last for _, last in _run(optimizer, drawn, parts)]
        if not all(map(torch.equal, found, _per_group(results, parts))):
            return None
    return zlib.crc32(b"".join(_bytes_of(results)))


def _fewer(tensors: list[Tensor]) -> list[Tensor]:
    return tensors[1:]


def _piece(rows: slice, tensors: list[Tensor]) -> list[Tensor]:
    return [tensor[rows] for tensor in tensors]


def _per_group(tensors: Sequence[Tensor], parts: _Parts) -> list[Tensor]:
    groups = [list(pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
    return [part for group in groups for part in parts(group)]


def _bytes_of(tensors: Iterable[Tensor]) -> Iterable[bytes]:
    return (t.cpu().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def _draw_all(optimizer: Optimizer) -> list[list[list[Tensor]]]:
    """Return, for each group with parameters, tensors and a gradient of each for every step."""
    generator, drawn = torch.Generator().manual_seed(0), []
    for group in _groups_of(optimizer):
        like = group["params"][0], _SHAPES[_dims_of(group)]
        drawn.append([_draw(generator, *like) for _ in range(1 + _NUM_STEPS)])
    return drawn


def _groups_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def _dims_of(group: dict[str, Any]) -> frozenset[int]:
    return frozenset(min(max(item.ndim, 1), 2) for item in group["params"])


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _run(
    optimizer: Optimizer, drawn: Sequence[Sequence[list[Tensor]]], parts: _Parts
) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter before and after some steps of a copy of the optimizer."""
    copy, groups = _copy_of(optimizer), []
    for group, (values, *gradients) in zip(_groups_of(optimizer), drawn, strict=True):
        options = deepcopy(_options_of(group))
        if "lr" in options and not options["lr"]:
            options["lr"] = 1e-2  # With 0, as at the start of a warm-up, nothing would change.
        items = [nn.Parameter(tensor) for tensor in parts(_copies(values))]
        copy.param_groups.append({**options, "params": items})
        copy.state.update({item: state for item in items if (state := _begun(optimizer, item))})
        groups.append((gradients, items))
    first = [item.detach().clone() for _, items in groups for item in items]
    for step in range(_NUM_STEPS):
        for gradients, items in groups:
            for item, gradient in zip(items, parts(_copies(gradients[step])), strict=True):
                item.grad = gradient
        copy.step()
    last = [item.detach() for _, items in groups for item in items]
    return list(zip(first, last, strict=True))


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
