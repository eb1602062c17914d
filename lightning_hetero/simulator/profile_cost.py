"""Times from a measured profile (AutoHet §III-D): blocks by binary decomposition, fits between.

What a profile lacks is taken from the roofline and the cluster: memory that wasn't measured, the
optimizer's step, and links over which no messages were measured.
"""

from collections.abc import Sequence

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.profile import BlockTimes, LayerMemory, Profile
from lightning_hetero.core.time_fit import TimeFit
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.memory import MicroBatchShape
from lightning_hetero.simulator.roofline import RooflineCost
from lightning_hetero.simulator.stage_shape import StageShape
from lightning_hetero.simulator.state_layout import StateLayout

__all__ = ["ProfileCost", "choose_cost"]


def choose_cost(
    cluster: Cluster, model: ModelSpec, profile: Profile | None, *, layout: StateLayout
) -> CostModel:
    """Return the costs of a measured profile, or of data sheets without one."""
    if profile is None:
        return RooflineCost(cluster, model, layout=layout)
    return ProfileCost(cluster, model, profile, layout=layout)


class ProfileCost(RooflineCost):
    """Costs as measured on the cluster's device types.

    Raises:
        ProfileError: The profile is of another model or lacks a device type of the cluster.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        profile: Profile,
        *,
        layout: StateLayout | None = None,
    ) -> None:
        profile.check(model=model)
        super().__init__(profile.with_links(cluster), model, layout=layout)
        self.profile = profile
        self._fits: dict[StageShape, tuple[TimeFit, TimeFit]] = {}

    def measure_stage_s(
        self, shape: StageShape, microbatch: MicroBatchShape
    ) -> tuple[float, float]:
        """Return the measured times of exactly this micro-batch, or else fitted ones."""
        device = self.profile.device(shape.device)
        forward, backward = self._measured_s(device.at(shape.tp_degree), shape, microbatch)
        if device.includes_tp_traffic:
            return forward, backward
        traffic = shape.num_layers * self.layer_traffic_s(shape, sum(microbatch))
        return forward + traffic, backward + traffic

    def _measured_s(
        self, times: Sequence[BlockTimes], shape: StageShape, microbatch: MicroBatchShape
    ) -> tuple[float, float]:
        lengths = tuple(sorted(microbatch))
        for measured in times:
            if tuple(sorted(measured.lengths)) == lengths:
                return _stage_s(measured, shape)
        fits = self._fits.get(shape)
        if fits is None:
            samples = [(measured.lengths, _stage_s(measured, shape)) for measured in times]
            fits = self._fits[shape] = (
                TimeFit.of([(lengths, pair[0]) for lengths, pair in samples]),
                TimeFit.of([(lengths, pair[1]) for lengths, pair in samples]),
            )
        return fits[0](microbatch), fits[1](microbatch)

    def activation_bytes(self, shape: StageShape, num_tokens: int) -> float:
        """Return the measured bytes, or the roofline's estimate if none were measured."""
        memory = self._memory(shape)
        if memory is None:
            return super().activation_bytes(shape, num_tokens)
        per_token = shape.num_layers * memory.layer_bytes_per_token
        if shape.has_embedding:
            per_token += memory.embedding_bytes_per_token
        return per_token * num_tokens

    def products_bytes(self, shape: StageShape) -> float:
        """Return the measured bytes, else infinity; the roofline's if no memory was measured."""
        memory = self._memory(shape)
        if memory is None:
            return super().products_bytes(shape)
        found = memory.products_bytes_per_token
        return float("inf") if found is None else found

    def transient_bytes(self, shape: StageShape, num_tokens: int) -> float:
        """Return the measured bytes of the head, or the roofline's estimate."""
        memory = self._memory(shape)
        if memory is None:
            return super().transient_bytes(shape, num_tokens)
        return memory.head_bytes_per_token * num_tokens if shape.has_head else 0.0

    def step_s(self, shape: StageShape, num_owned: float) -> float:
        """Return the measured seconds of the optimizer, or the roofline's estimate."""
        per_param = self.profile.device(shape.device).step_s_per_param
        return super().step_s(shape, num_owned) if per_param is None else num_owned * per_param

    def _memory(self, shape: StageShape) -> LayerMemory | None:
        found = self.profile.device(shape.device).memory
        return next((entry for entry in found if entry.tp_degree == shape.tp_degree), None)

    def _speed(self, device: str) -> float:
        """Return how fast a device ran one layer, so that mixed TP groups take the slowest."""
        times = self.profile.device(device).times
        first = min(times, key=lambda entry: (entry.tp_degree, sum(entry.lengths)))
        seconds = sum(first.blocks[1])
        return sum(first.lengths) / seconds if seconds else float("inf")


def _stage_s(times: BlockTimes, shape: StageShape) -> tuple[float, float]:
    forward, backward = times.layers_s(shape.num_layers)
    if shape.has_embedding:
        forward, backward = forward + times.embedding[0], backward + times.embedding[1]
    if shape.has_head:
        forward, backward = forward + times.head[0], backward + times.head[1]
    return forward, backward
