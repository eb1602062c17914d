"""Say in one sentence why a run is slow and what to do about it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.straggler.operations.trace import OperationTrace
from lightning_hetero.straggler.operations.what_if import Cause, Explanation

__all__ = ["Layout", "answer"]

_WORTH_SAYING = 1.02
_SECOND_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the job was laid out, as far as is known."""

    tp_size: int = 1
    """Devices behind each rank of the trace."""
    layers: tuple[int, ...] = ()
    """Layers of each stage."""
    nodes: Mapping[int, str] = field(default_factory=dict)
    """The node of each rank."""

    @classmethod
    def from_dict(cls, entry: object, trace: OperationTrace) -> "Layout":
        """Read `tp_size`, `layers` and `nodes`, and compare `dp_size` and `pp_size` with a trace.

        Raises:
            ConfigurationError: It isn't a layout, or is that of another job.
        """
        if not isinstance(entry, Mapping):
            raise ConfigurationError("A layout is a mapping such as {dp_size: 4, pp_size: 4}.")
        for name, found in (("dp_size", trace.pipeline), ("pp_size", trace.stage)):
            if name in entry and entry[name] != int(found.max()) + 1:
                raise ConfigurationError(
                    f"The layout says {name} {entry[name]}, but the trace has "
                    f"{int(found.max()) + 1}. Give the layout of the same job."
                )
        try:
            nodes = {int(rank): str(node) for rank, node in dict(entry.get("nodes", {})).items()}
            return cls(
                tp_size=int(entry.get("tp_size", 1)),
                layers=tuple(int(count) for count in entry.get("layers", ())),
                nodes=nodes,
            )
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"The layout has a wrong value: {error}.") from error


def answer(explanation: Explanation, layout: Layout | None = None) -> str:
    """Return the slowdown, its main cause and what to do, in one sentence."""
    took = f"{explanation.actual_s:.4g} s a step where {explanation.ideal_s:.4g} s are possible"
    if explanation.slowdown < _WORTH_SAYING or not explanation.causes:
        return f"Not slow: {took}."
    first, *rest = explanation.causes
    text = (
        f"{explanation.slowdown:.2f} × slower than possible ({took}); {first.share:.2f} of the "
        f"excess is {_name(first, layout or Layout())}: {_remedy(first, layout or Layout())}"
    )
    second = next((cause for cause in rest if cause.share >= _SECOND_SHARE), None)
    if second is not None:
        name, remedy = (say(second, layout or Layout()) for say in (_name, _remedy))
        text += f"; another {second.share:.2f} is {name}: {remedy}"
    return f"{text}."


def _name(cause: Cause, layout: Layout) -> str:
    which: Any = cause.which
    if cause.kind == "rank":
        last = which + layout.tp_size - 1
        ranks = f"rank {which}" if last == which else f"one of ranks {which} to {last}"
        return f"{ranks}, {cause.factor:.2f} × slower than its like"
    if cause.kind == "stage":
        return (
            f"the split into stages: stage {which} has {cause.factor:.2f} × the mean stage's work"
        )
    if cause.kind == "link":
        return f"a slow link ({which}), {cause.factor:.2f} × slower than its like"
    if cause.kind == "pauses":
        return "pauses" if which is None else f"pauses of rank {which}"
    if cause.kind == "lengths":
        return "micro-batches of unequal cost"
    return "spread over all operations, or between them"


def _remedy(cause: Cause, layout: Layout) -> str:
    which: Any = cause.which
    if cause.kind == "rank":
        return f"replace {layout.nodes.get(which, 'its device')} or give it less work"
    if cause.kind == "stage":
        if which < len(layout.layers):
            surplus = layout.layers[which] * (1.0 - 1.0 / cause.factor)
            count = max(1, round(surplus))
            return f"move {count} layer{'s' if count > 1 else ''} from stage {which} to the others"
        return f"move {1.0 - 1.0 / cause.factor:.0%} of its layers' work to the other stages"
    return {
        "link": "check it, or place stages so that less crosses it",
        "pauses": "collect garbage on all ranks at the same step, and look at data loading",
        "lengths": "pack samples by their predicted cost (Σl² counts) instead of their tokens",
    }.get(cause.kind, "look at the time between operations (launches, data loading, logging)")
