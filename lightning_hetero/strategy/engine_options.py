"""The user's options for the engine, from which it is made once there are ranks and plans."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import lightning.pytorch as pl
from jsonargparse.typing import range_serializer, register_type
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hetero.autoplan.engine_choices import (
    check_room_for_states,
    find_standbys_of_run,
    with_exchange,
)
from lightning_hetero.autoplan.facts import Emulation, RunFacts, find_data, find_sizes
from lightning_hetero.core.devices import Arithmetic
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.reading import parse_range
from lightning_hetero.exchange.transfers import ExchangeKind
from lightning_hetero.runtime.iteration.config import EngineConfig
from lightning_hetero.runtime.iteration.engine import Engine
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel
from lightning_hetero.schedules import Schedule

if TYPE_CHECKING:
    import torch

    from lightning_hetero.autoplan.facts import RunPlans
    from lightning_hetero.runtime.ranks.communicators import Communicators
    from lightning_hetero.strategy.precision import HeteroPrecision

_WITHOUT_LAYERS = (
    "The module has no list of layers, so it is trained data parallel, one whole model a rank. To "
    "cut it into stages, keep its repeated blocks in one nn.ModuleList, or name it: "
    'HeteroStrategy(layers="model.blocks").'
)

_ARITHMETIC = {
    "torch.bfloat16": Arithmetic.BF16,
    "torch.float16": Arithmetic.FP16,
    "torch.float32": Arithmetic.FP32,
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The arguments of `HeteroStrategy` with these names.

    Raises:
        ConfigurationError: `num_microbatches` is below 1; `redundancy` isn't 0 or 1, or is 1 under
            an exchange that can't have it; or `schedule` splits the backward of compiled layers.
    """

    num_microbatches: int | None
    redundancy: int
    layers: str | None
    tp_plan: Mapping[str, str] | None
    sequence_parallel: bool
    config: EngineConfig
    """The engine's own options; those that depend on ranks and plans are filled in later."""

    def __post_init__(self) -> None:
        if self.num_microbatches is not None and self.num_microbatches < 1:
            text = f"num_microbatches is {self.num_microbatches}; it must be 1 or more."
            raise ConfigurationError(text)
        if self.redundancy not in (0, 1):
            raise ConfigurationError(
                f"redundancy is {self.redundancy}; it must be 0, or 1 for a standby of each slice. "
                "To survive the loss of both, save with LayerwiseCheckpoint(replicas=2)."
            )
        is_split = self.config.schedule is Schedule.SPLIT
        if is_split and self.config.layer_options.compile_layers:
            raise ConfigurationError(
                f'schedule="{self.config.schedule}" splits the backward of linear layers, which '
                'compiled layers hide. Use schedule="auto" or "deep", or compile_layers=False.'
            )
        own_orders = ExchangeKind.REDUCE_SCATTER, ExchangeKind.BY_NODE
        if self.redundancy and self.config.exchange in own_orders:
            raise ConfigurationError(
                f'exchange="{self.config.exchange}" sums in an order of its own for each rank, so '
                'a slice and its standby would differ. Use exchange="collectives", or redundancy=0.'
            )

    def gather_facts(
        self,
        module: pl.LightningModule,
        comms: "Communicators",
        device: "torch.device",
        precision: "HeteroPrecision",
        emulation: Emulation,
    ) -> RunFacts:
        """Return the facts of a run that are known before it has a plan."""
        trainer = module.trainer
        master = precision.master_dtype or precision.compute_dtype
        return RunFacts(
            module=module,
            layout=ModelLayout.of(module, layers=self.layers),
            comms=comms,
            device=device,
            sizes=lambda: find_sizes(trainer),
            emulation=emulation,
            arithmetic=_ARITHMETIC.get(str(precision.compute_dtype)),
            compute_bytes=precision.compute_dtype.itemsize,
            summed_bytes=4 if self.config.fp32_gradients else 2,
            master_bytes=master.itemsize,
            redundancy=self.redundancy,
            owned_device=self.config.owned_device,
            layer_options=self.config.layer_options,
            schedule=self.config.schedule,
            data=find_data(trainer),
        )

    def make_engine(
        self, facts: RunFacts, plans: "RunPlans", precision: "HeteroPrecision", *, seed: int
    ) -> Engine:
        """Cut the module into slices and return the engine that runs it; collective."""
        layout = facts.layout
        if not layout.layers:
            self.config.layer_options.refuse_without_layers()
            rank_zero_warn(_WITHOUT_LAYERS)
        if precision.scaler is not None and self.config.exchange is ExchangeKind.REDUCE_SCATTER:
            raise ConfigurationError(
                'exchange="reduce-scatter" sums gradients in fp16, where an overflow of the sum '
                'isn\'t found. Use exchange="collectives", or precision="bf16-mixed".'
            )
        config = replace(
            self.config,
            num_microbatches=self.num_microbatches
            or max(item.usual_num_microbatches for item in plans.first.pipelines),
            compute_dtype=precision.compute_dtype,
            master_dtype=precision.master_dtype,
            scales_loss=precision.scaler is not None,
            standbys=find_standbys_of_run(facts, plans),
            seed=seed,
        )
        tensor_parallel = None
        if self.tp_plan is not None or plans.may_use_tensor_parallelism:
            tensor_parallel = TensorParallel(
                facts.module,
                layout,
                option=self.tp_plan,
                sequence_parallel=self.sequence_parallel,
            )
            for plan in plans.candidates:
                tensor_parallel.check_degrees(plan)
            layout = tensor_parallel.layout
        config = with_exchange(config, facts, plans, layout.specs)
        check_room_for_states(facts, plans, config, layout.specs)
        return Engine(
            facts.module,
            layout,
            plans.first,
            facts.comms,
            config=config,
            device=facts.device,
            clock=facts.emulation.make_clock(facts.device),
            tensor_parallel=tensor_parallel,
        )


def register_layers() -> None:
    """Let jsonargparse, with which LightningCLI parses, read layers as [0, 4] and as "range(0, 4)".

    What it could read before, such as "range(4)", it still reads.
    """
    register_type(range, serializer=range_serializer, deserializer=_read_layers)


def _read_layers(value: object) -> range:
    if isinstance(value, str):
        digits = value.replace(" ", "").removeprefix("range(").removesuffix(")").split(",")
        if value.strip().startswith("range(") and all(d.lstrip("-").isdigit() for d in digits):
            return range(*map(int, digits))
    return parse_range(value)
