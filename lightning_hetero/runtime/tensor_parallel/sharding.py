"""Run the layers of a stage on a tensor-parallel group of any degree.

The forward of every module in `ModelCuts` is wrapped once (see `forward`). With whole weights the
wrapper does nothing; with shards it adds the group's collectives, so that activations outside
sharded modules are the same on all ranks of the group, as in Megatron-LM. So stages may have
different degrees, and a change of plan doesn't change the module.

All ranks of a group draw the same random numbers. So dropout on whole activations is the same on
all, and dropout inside a region (attention probabilities) draws the same numbers for the heads of
one rank as for those of another.
"""

from collections.abc import Callable, Mapping
from math import gcd
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.slices.known_by_shape import KnownByShape, hide_again, show_values
from lightning_hetero.runtime.tensor_parallel.collectives import StageGroup, TPGroup
from lightning_hetero.runtime.tensor_parallel.cuts import (
    ModelCuts,
    find_regions,
    with_partial_gradients,
)
from lightning_hetero.runtime.tensor_parallel.forward import (
    RegionForward,
    ShardedForward,
    SharedHeadsForward,
)
from lightning_hetero.runtime.tensor_parallel.styles import TPStyle

_UNWRAPPED = (TPStyle.PARTIAL, TPStyle.REPLICATE)


class TensorParallel:
    """The sharded modules of one model, and the group that this rank is in.

    The parameters of `root` are still whole. `option` has styles by name pattern; None takes the
    module's own plan. With `sequence_parallel` activations between sharded regions are cut along
    tokens.
    """

    def __init__(
        self,
        root: nn.Module,
        layout: ModelLayout,
        *,
        option: Mapping[str, str] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        cuts = ModelCuts.of(root, layout, option)
        self.layout = cuts.layout
        self.sequence_parallel = sequence_parallel
        self.stage = StageGroup(sequence_parallel=sequence_parallel)
        self._wrapped: list[tuple[nn.Module, Any]] = []
        regions: dict[str, nn.Module] = {}
        if sequence_parallel:
            regions = find_regions(root, self.layout, cuts)
            self.layout = with_partial_gradients(self.layout, regions)
        for item in cuts.modules:
            if item.style not in _UNWRAPPED:
                inside = any(item.name == r or item.name.startswith(f"{r}.") for r in regions)
                forward = ShardedForward(self.stage, self.layout, item, in_region=inside)
                self._wrap(item.module, forward)
        for name, module in regions.items():
            self._wrap(module, RegionForward(self.stage, self.layout, module, name))
        self._share_heads(root, cuts)
        parts = {id(part) for layer in layout.layers for part in layer.modules()}
        others = [item.module for item in cuts.modules if id(item.module) not in parts]
        self._handles = [i for module in (*layout.layers, *others) for i in _show_inside(module)]

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._wrapped.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _share_heads(self, root: nn.Module, cuts: ModelCuts) -> None:
        shared = {layer: heads for layer, heads in cuts.heads.items() if heads.readers > 1}
        around = {
            heads.attention: heads for heads in shared.values() if heads.attribute is not None
        }
        for names, outer in ((shared, False), (around, True)):
            for name, heads in names.items():
                module = root.get_submodule(name)
                forward = SharedHeadsForward(self.stage, self.layout, heads, module, outer=outer)
                self._wrap(module, forward)

    def remove(self) -> None:
        """Restore the modules' own forwards."""
        for module, own in reversed(self._wrapped):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own
        self._wrapped.clear()
        for handle in self._handles:
            handle.remove()

    @property
    def group(self) -> dist.ProcessGroup | None:
        """This rank's group under the plan that runs; None where its stage has one rank."""
        return None if self.stage.peers is None else self.stage.peers.group

    def enter_plan(self, plan: ParallelPlan, comms: Communicators) -> None:
        """Set this rank's group to that of a plan; collective if the plan has new groups."""
        self.check_degrees(plan)
        group = comms.tensor_parallel_group(plan)
        place = plan.place(comms.global_rank)
        self.stage.peers = None
        if group is not None and place is not None:
            ranks = plan.pipelines[place.pipeline_index].stages[place.stage_index].ranks
            self.stage.peers = TPGroup(
                group=group,
                degree=len(ranks),
                tp_rank=place.tp_rank,
                positions=tuple(sorted(ranks).index(rank) for rank in ranks),
            )

    def check_degrees(self, plan: ParallelPlan) -> None:
        """Raise ModelError unless every degree of the plan divides heads and features."""
        limits = {
            spec.name: spec
            for spec in self.layout.specs
            if spec.tp_dim is not None and not (spec.tp_uneven and spec.tp_blocks == 1)
        }
        largest = gcd(*(spec.tp_parts for spec in limits.values())) if limits else 0
        name = min(limits, key=lambda item: (limits[item].tp_parts, item), default="")
        for pipeline_index, stage_index, stage in plan.iter_stages():
            if largest % stage.tp_degree:
                parts = limits[name].tp_parts
                what = f" ({parts} heads)" if limits[name].tp_heads else ""
                able = [str(d) for d in range(1, largest + 1) if largest % d == 0]
                raise ModelError(
                    f"Pipeline {pipeline_index} stage {stage_index} has tensor-parallel degree "
                    f"{stage.tp_degree}, which {name}{what} can't be cut into. Degrees that work "
                    f"for this model: {', '.join(able)}."
                )


def _show_inside(module: nn.Module) -> list[RemovableHandle]:
    """Register hooks that show hidden weights of a module while it runs; return their handles."""
    were_hidden = False

    def show(*_: Any) -> None:
        nonlocal were_hidden
        hidden = [item for item in module.parameters() if isinstance(item, KnownByShape)]
        were_hidden = bool(hidden)
        show_values(hidden)

    def hide(*_: Any) -> None:
        if were_hidden:
            hide_again(module.parameters())

    return [
        module.register_forward_pre_hook(show),
        module.register_forward_hook(hide, always_call=True),
    ]
