"""Times of devices: from data sheets (`RooflineCost`), or as measured (`ProfileCost`).

A roofline takes the longer of work over reachable peak, and bytes over bandwidth. It is
deliberately coarse, for planning before anything was measured. The reasons for its constants are
beside them; a measured profile is always better.

A profile has times of blocks by binary decomposition (AutoHet §III-D), and fits between them.
Whatever it lacks is taken from the roofline and the cluster: memory that wasn't measured, the
optimizer's step, and links over which no messages were measured.
"""

from collections.abc import Sequence

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.profile import BlockTimes, LayerMemory, Profile, TimeFit
from lightning_hetero.simulator.cost import CostModel
from lightning_hetero.simulator.memory import MicroBatchShape
from lightning_hetero.simulator.stage import StageShape, StateLayout

# Share of the data sheet's peak that large 16-bit matrix products reach. Ampere sustains about
# three quarters; Hopper's figure is at a clock that its power limit does not hold; H20 has the same
# memory and power for a seventh of the peak and so gets close to it.
_MATMUL_EFFICIENCY = {
    "H100-80GB": 0.6,
    "H100-PCIe-80GB": 0.6,
    "H100-NVL-94GB": 0.6,
    "H800-80GB": 0.6,
    "H200-141GB": 0.6,
    "GH200-96GB": 0.6,
    "B200-180GB": 0.6,
    "H20-96GB": 0.85,
}
_DEFAULT_MATMUL_EFFICIENCY = 0.7
# Fused attention reaches nine tenths of what matrix products do (FlashAttention-2 on A100: 0.63 to
# 0.73 of peak). First set to 0.65, raised after comparing with measured A800 stages of 32k tokens.
_ATTENTION_EFFICIENCY = 0.9
# Its backward recomputes the scores: 5 matrix products where the forward has 2.
_ATTENTION_BACKWARD = 2.5
# Reads and writes of the hidden state by norms, residuals, rotations and activations of one layer's
# forward, in widths of the hidden state; what the MLP adds is counted apart.
_POINTWISE_PASSES = 14
# Kernel launches of one layer's forward that don't hide behind others, seconds.
_LAUNCH_S = 30e-6
_STEP_BYTES_PER_PARAM = 34  # Adam: reads 4 and writes 3 fp32 values, then a 16-bit weight and more.


class RooflineCost(CostModel):
    """Costs of a transformer on known devices.

    Matrix products run at the device's rate for `layout.computes_in`: that of fp32 where it has no
    units for bf16 or fp16. In 32 bits all that is read, written and kept is twice as wide.
    """

    def measure_stage_s(
        self, shape: StageShape, microbatch: MicroBatchShape
    ) -> tuple[float, float]:
        """Return forward and backward seconds, TP traffic included."""
        tokens = sum(microbatch)
        forward, backward = self._layer_s(shape, microbatch)
        times = [shape.num_layers * forward, shape.num_layers * backward]
        if shape.has_head:
            rate = self._matmul_flops_per_s(shape)
            head = self.model.head_flops(tokens) / rate
            # Softmax and its gradient pass over the logits, in 16 and 32 bits.
            softmax = 6 * self._width * tokens * self.model.vocab_size / self._memory_rate(shape)
            times[0] += head + softmax
            times[1] += (1 + self.model.weight_gradient_shares[1]) * head + softmax
        if shape.has_embedding:
            lookup = 2 * self._hidden_bytes(tokens) / self._memory_rate(shape)
            times[0] += lookup
            times[1] += lookup if self.model.embedding_params else 0.0
        return times[0], times[1]

    def activation_bytes(self, shape: StageShape, num_tokens: int) -> float:
        """Return the bytes that fused attention and plain autograd keep.

        Around the TP region: input and output of both norms; inside it: query, key, value before
        and after rotation, attention's output, and the MLP's pre- and post-activations.
        Frozen matrices without adapters keep no inputs.
        """
        model = self.model
        outside = 4 * model.hidden_size
        mlp = (4 if model.gated_mlp else 2) * model.intermediate_size
        inside = 3 * model.query_size + 3 * model.key_size_in_group(shape.tp_degree) + mlp
        layer = outside + inside / shape.tp_degree
        kept = float(self._width * shape.num_layers * layer)
        if shape.has_embedding:
            kept += self._width * model.hidden_size
        return kept * num_tokens

    def products_bytes(self, shape: StageShape) -> float:
        """Return the bytes of query, key, value, attention, projection and MLP pre-activations."""
        model = self.model
        mlp = (2 if model.gated_mlp else 1) * model.intermediate_size
        inside = 2 * model.query_size + 2 * model.key_size_in_group(shape.tp_degree) + mlp
        return float(self._width * (model.hidden_size + inside / shape.tp_degree))

    def transient_bytes(self, shape: StageShape, num_tokens: int) -> float:
        """Return the bytes of logits in the compute dtype, and of softmax and gradient in fp32."""
        if not shape.has_head:
            return 0.0
        return (8.0 + self._width) * self.model.vocab_size / shape.tp_degree * num_tokens

    def step_s(self, shape: StageShape, num_owned: float) -> float:
        """Return Adam's time by the bytes it touches."""
        return num_owned * _STEP_BYTES_PER_PARAM / self.device(shape.device).memory_bytes_per_s

    def layer_traffic_s(self, shape: StageShape, num_tokens: int) -> float:
        """Return the seconds of TP traffic in a layer's forward; its backward takes as long.

        Two ring all-reduces of the hidden state each way (Megatron-LM's f and g).
        """
        count = shape.tp_degree
        if count == 1:
            return 0.0
        own = self.device(shape.device).intra_node_bytes_per_s, self.cluster.intra_node_latency_s
        bytes_per_s, latency_s = shape.link or own
        message_bytes = self._hidden_bytes(num_tokens) / count
        return 4 * (count - 1) * (latency_s + message_bytes / bytes_per_s)

    def _layer_s(self, shape: StageShape, microbatch: MicroBatchShape) -> tuple[float, float]:
        model, tokens = self.model, sum(microbatch)
        rate = self._matmul_flops_per_s(shape)
        copied = model.copied_params_per_layer(shape.tp_degree)
        matmul_s = (model.linear_flops_per_layer(tokens) + 2.0 * copied * tokens) / rate
        weights = self._width * (model.matrix_params_per_layer + copied)
        matmul_s = max(matmul_s, weights / self._memory_rate(shape))
        attention_s = model.attention_flops_per_layer(microbatch) / (rate * _ATTENTION_EFFICIENCY)
        mlp = (4 if model.gated_mlp else 2) * model.intermediate_size / shape.tp_degree
        touched = self._width * tokens * (_POINTWISE_PASSES * model.hidden_size + mlp)
        pointwise_s = touched / self.device(shape.device).memory_bytes_per_s
        traffic_s = self.layer_traffic_s(shape, tokens)
        unpack_s = self._unpack_s(shape)
        forward = matmul_s + attention_s + pointwise_s + traffic_s + unpack_s
        backward = (1 + model.weight_gradient_shares[0]) * matmul_s + unpack_s + traffic_s
        backward += _ATTENTION_BACKWARD * attention_s + 1.5 * pointwise_s
        return forward + _LAUNCH_S, backward + _LAUNCH_S

    def _unpack_s(self, shape: StageShape) -> float:
        """Return the seconds in which a layer's quantized matrices are read, and values written."""
        bits = self.model.tuning and self.model.tuning.stored_bits
        if not bits:
            return 0.0
        touched = self.model.dequantized_params()[0] * (bits / 8 + self._width)
        return touched / self._memory_rate(shape)

    def _matmul_flops_per_s(self, shape: StageShape) -> float:
        efficiency = _MATMUL_EFFICIENCY.get(shape.device, _DEFAULT_MATMUL_EFFICIENCY)
        peak = self.device(shape.device).flops_per_s(self.layout.computes_in)
        return peak * efficiency * shape.tp_degree

    @property
    def _width(self) -> int:
        """Bytes of a value that is computed with."""
        return self.layout.weight_bytes

    def _memory_rate(self, shape: StageShape) -> float:
        return self.device(shape.device).memory_bytes_per_s * shape.tp_degree


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
        # Layers are measured without quantization.
        added = shape.num_layers * self._unpack_s(shape)
        if not device.includes_tp_traffic:
            added += shape.num_layers * self.layer_traffic_s(shape, sum(microbatch))
        return forward + added, backward + added

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
