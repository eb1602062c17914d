"""One pass of one micro-batch through the user's step on a stage, and how a stage ends it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["MicrobatchRun", "StageEnd"]


class StageEnd(BaseException):
    """Leaves the user's step at the end of a stage that isn't the last.

    It is no error, and no `except Exception` of the user's may stop it.
    """

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass
class MicrobatchRun:
    """One pass of one micro-batch through the user's step on this stage."""

    layers: range
    """Layers of the stage."""
    num_layers: int
    """Layers of the model."""
    seed: tuple[int, ...]
    """What the micro-batch's random numbers depend on."""
    receive: Callable[[], Tensor] | None
    """Returns the hidden state that the stage before made; None on first stages."""
    before_layer: Callable[[int], None]
    """Called with the index of each layer of the stage before it runs, and with `num_layers`."""
    behind_layers: TorchFunctionMode
    """Watches the torch functions called behind the last layer, or all if there are no layers."""
    entered: bool = False
    finished: bool = False
    watching: bool = False
    hidden_in: Tensor | None = field(default=None, repr=False)
    last_hidden: Tensor | None = field(default=None, repr=False)
    """What the layer before returned, to see that nothing is computed between layers."""

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage holds the model's last layer."""
        return self.layers.stop == self.num_layers
