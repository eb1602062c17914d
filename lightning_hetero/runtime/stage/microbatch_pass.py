"""One pass of one micro-batch through the user's step on a stage, and how a stage ends it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode

from lightning_hetero.core.errors import ModelError
from lightning_hetero.runtime.random_state import seed_of, seed_torch
from lightning_hetero.runtime.results.targets import LossWatch
from lightning_hetero.runtime.stage.read_watch import ReadWatch
from lightning_hetero.runtime.stage.side_tensors import Handover
from lightning_hetero.runtime.stage.stage_input import StageInput

__all__ = ["MicrobatchPass", "StageEnd", "in_place_between"]


class StageEnd(BaseException):
    """Leaves the user's step at the end of a stage that isn't the last.

    It is no error, and no `except Exception` of the user's may stop it.
    """

    def __init__(self, handed_on: Handover) -> None:
        self.handed_on = handed_on


@dataclass
class MicrobatchPass:
    """One pass of one micro-batch through the user's step on this stage."""

    layers: range
    """Layers of the stage."""
    num_layers: int
    """Layers of the model."""
    seed: tuple[int, ...]
    """What the micro-batch's random numbers depend on."""
    receive: Callable[[], Handover] | None
    """Returns what the stage before hands on; None on first stages."""
    before_layer: Callable[[int], None]
    """Called with the index of each layer of the stage before it runs, and with `num_layers`."""
    behind_layers: LossWatch
    """Watches the torch functions called behind the layers, or outside of them all."""
    reads: ReadWatch | None = None
    """Follows what the stage uses of parameters outside the layers, while that isn't known yet."""
    called: list[int] = field(default_factory=list)
    """Indices of the layers called so far, also of those that run on other stages."""
    finished: bool = False
    watching: bool = False
    received: Handover | None = field(default=None, repr=False)
    handed_on: Handover = field(default_factory=Handover, repr=False)
    """What the stage behind gets, as far as it is known."""
    with_gradients: bool = False
    """Whether the step began with autograd switched on."""
    is_reentrant: bool = False
    """Whether a checkpoint of the older kind hides layers from autograd."""
    stage_input: StageInput | None = field(default=None, repr=False)
    _known_outside: dict[int, Any] | None = field(default=None, repr=False)
    """What was known of numbers when the first layer was called."""
    _seeds: dict[tuple[int, int], int] = field(default_factory=dict, repr=False)
    last_hidden: Tensor | None = field(default=None, repr=False)
    """What the layer before returned, to see that nothing is computed between layers."""
    last_version: int = 0
    """How often that had been changed in place when the layer returned it."""
    hidden_places: dict[int, int | str] = field(default_factory=dict, repr=False)
    """Which argument of each layer called was the hidden state."""

    def arrived(self) -> Handover:
        """Return what the stage before hands on; waits for it the first time."""
        if self.received is None:
            assert self.receive is not None
            self.received = self.receive()
            self.handed_on = self.received.copy()
        return self.received

    def watch(self) -> None:
        """Watch the torch functions that the step calls from now on; idempotent."""
        if self._known_outside is not None:
            self.behind_layers.reductions.restore(self._known_outside)
        if not self.watching:
            self.watching = True
            self.behind_layers.__enter__()  # type: ignore[no-untyped-call]

    def pause_watch(self) -> None:
        """Watch nothing until `watch`; what other modes over the watch show it is forgotten."""
        if self._known_outside is None:
            self._known_outside = self.behind_layers.reductions.snapshot()
        if _get_current_function_mode() is self.behind_layers:  # type: ignore[no-untyped-call]
            self.end_watch()

    def end_watch(self) -> None:
        """Watch no longer."""
        if self.watching:
            self.watching = False
            self.behind_layers.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Watch nothing inside this context; what other modes show it is forgotten."""
        known = self.behind_layers.reductions.snapshot()
        top = _get_current_function_mode()  # type: ignore[no-untyped-call]
        is_on_top = self.watching and top is self.behind_layers
        if is_on_top:
            self.end_watch()
        try:
            yield
        finally:
            if is_on_top:
                self.watch()
            self.behind_layers.reductions.restore(known)

    @property
    def has_stages(self) -> bool:
        """Whether other stages run layers of the model, too."""
        return len(self.layers) < self.num_layers

    @property
    def is_chain(self) -> bool:
        """Whether each layer was called once, in order."""
        return self.called == list(range(self.num_layers))

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage holds the model's last layer."""
        return self.layers.stop == self.num_layers

    def seed_torch(self, index: int, *, again: bool = False) -> None:
        """Seed torch's generators for layer `index`, or for the code behind the layers, -1.

        A layer that is called more than once draws other numbers each time. One that is computed
        `again` draws those of the first time: a checkpoint has put the generators back to where
        they were, so the seed before this one tells which time that was.
        """
        place = torch.initial_seed(), index
        if not again:
            earlier = sum(1 for _, known in self._seeds if known == index)
            self._seeds[place] = seed_of(*self.seed, index, *([earlier] if earlier else []))
        seed_torch(self._seeds.get(place, seed_of(*self.seed, index)))

    def keep_hidden(self, hidden: Tensor) -> None:
        """Remember what a layer returned."""
        self.last_hidden, self.last_version = hidden, _version_of(hidden)

    def check_unchanged(self, index: int) -> None:
        """Refuse to run layer `index` on a hidden state that was changed in place."""
        hidden = self.last_hidden if index else None
        if hidden is not None and _version_of(hidden) != self.last_version:
            raise ModelError(in_place_between(index - 1))


def in_place_between(index: int) -> str:
    """Return what to say where the output of layer `index` is changed in place."""
    return (
        f"The model computes something in place between layer {index} and layer {index + 1}, which "
        "would be lost where a stage ends there. Move the computation into the layers, or use a "
        "plan whose pipelines have one stage."
    )


def _version_of(hidden: Tensor) -> int:
    # Inference counts no versions; the stage behind then sees it, on its unknown tensor.
    return 0 if hidden.is_inference() else hidden._version
