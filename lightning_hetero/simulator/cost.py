"""Seconds and bytes of a stage and of its messages: the base of the roofline and profile models.

A micro-batch is given as the tuple of its sequences' lengths. The `StateLayout` determines which
states a rank keeps. By default each holder of a layer keeps the layer's weights and the gradients
of its own micro-batches; masters, optimizer states and gradients summed over all holders are
divided among the holders. In the systems that this one is compared with (`StateLayout.replicated`)
each replica keeps everything. Activations, kept or sent on, count once for each micro-batch in
flight; gradients that are sent between stages count for as long as they may be under way.
"""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.errors import PlanError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan, StagePlan
from lightning_hetero.simulator.links import ClusterLinks
from lightning_hetero.simulator.memory import (
    MemoryTerms,
    MicroBatchShape,
    in_flight_tokens,
    push_buffer_bytes,
    usable_bytes,
)
from lightning_hetero.simulator.stage import StageShape, StateLayout

_SUM_BYTES = 4
"""Bytes of an fp32 gradient sum that goes to the host."""
_HOST_STEP_BYTES = 42
"""Host bytes per parameter: Adam reads 4 and writes 3 fp32 values, sums are scaled and narrowed."""
_SELECTIVE_SHARE = 0.1
"""Share of a layer's forward that selective recomputation repeats, 1/30 of forward and backward;
measured on CPUs: 1 to 4 % of both (`python -m tests.benchmarks selective`)."""
_TRAFFIC_AGAIN = 0.5
"""Share of a layer's TP traffic that it repeats: the all-reduce after attention, not the MLP's."""


class CostModel(ClusterLinks, ABC):
    """Times and bytes of stages and transfers on one cluster for one model.

    Subclasses compute the costs of devices; everything else follows from cluster, model and layout.
    Results are cached, so use one object for many plans.
    """

    def __init__(
        self, cluster: Cluster, model: ModelSpec, *, layout: StateLayout | None = None
    ) -> None:
        super().__init__(cluster)
        self.model = model
        self.layout = layout or StateLayout()
        self._specs = {n.device: cluster.device_of_node(i) for i, n in enumerate(cluster.nodes)}
        self._shapes: dict[tuple[tuple[int, ...], int, int, int, int], StageShape] = {}
        self._compute: dict[tuple[StageShape, MicroBatchShape], tuple[float, float]] = {}
        self._last_shares: tuple[tuple[float, ...], float] = ((), 0.0)
        self._updates: dict[tuple[StageShape, float], float] = {}
        self._peaks: dict[tuple[StageShape, int, int, int, float | None], MemoryTerms] = {}

    def with_layout(self, layout: StateLayout) -> Self:
        """Return the same costs with another layout of states."""
        other = copy.copy(self)
        other.layout = layout
        other._shapes, other._compute, other._updates, other._peaks = {}, {}, {}, {}
        return other

    @abstractmethod
    def measure_stage_s(
        self, shape: StageShape, microbatch: MicroBatchShape
    ) -> tuple[float, float]:
        """Return forward and backward seconds of one micro-batch on a stage, TP traffic included.

        Neither transfers between stages nor recomputation count here.
        """

    @abstractmethod
    def activation_bytes(self, shape: StageShape, num_tokens: int) -> float:
        """Return the bytes that one rank keeps between a micro-batch's forward and backward.

        Counted as if no layer were recomputed; linear in layers and tokens.
        """

    def products_bytes(self, shape: StageShape) -> float:
        """Return the bytes per token that a layer keeps under selective recomputation.

        These are the outputs of matrix products and attention, from which all else is recomputed.
        Infinite if they aren't known, so that no plan has selective layers.
        """
        return math.inf

    def layer_traffic_s(self, shape: StageShape, num_tokens: int) -> float:
        """Return the seconds of TP traffic in a layer's forward; 0 if not known separately."""
        return 0.0

    @abstractmethod
    def transient_bytes(self, shape: StageShape, num_tokens: int) -> float:
        """Return the bytes that live only while one micro-batch runs: logits and the like."""

    @abstractmethod
    def step_s(self, shape: StageShape, num_owned: float) -> float:
        """Return the seconds in which a rank updates this number of parameters."""

    def device(self, name: str) -> DeviceSpec:
        """Return a device type of the cluster."""
        return self._specs[name]

    def shape_of(self, stage: StagePlan) -> StageShape:
        """Return the shape of a plan's stage: its slowest device and its slowest link."""
        again = stage.recomputed_layers or 0, stage.selective_layers or 0
        key = (stage.ranks, stage.layers.start, stage.layers.stop, *again)
        shape = self._shapes.get(key)
        if shape is None:
            shape = self._shapes[key] = self._find_shape(stage)
        return shape

    def shape_in(self, plan: ParallelPlan, stage: StagePlan) -> StageShape:
        """Return the shape of a plan's stage; `owns_on_host` if all its ranks are host owners."""
        shape = self.shape_of(stage)
        if not plan.host_owners or not set(stage.ranks) <= set(plan.host_owners):
            return shape
        return shape._replace(owns_on_host=True)

    def compute_s(self, shape: StageShape, microbatch: MicroBatchShape) -> tuple[float, float]:
        """Return forward and backward seconds of one micro-batch on a stage."""
        key = (shape, microbatch)
        times = self._compute.get(key)
        if times is None:
            forward, backward = self.measure_stage_s(shape, microbatch)
            backward += self.recompute_s(shape, microbatch)
            times = self._compute[key] = forward, backward
        return times

    def weight_s(self, shape: StageShape, microbatch: MicroBatchShape) -> float:
        """Return the seconds of a backward that the gradients of weights take, if it is split.

        A linear layer's two products take the same time, so it is half of what isn't recomputation,
        less if weights are frozen.
        """
        backward_s = self.compute_s(shape, microbatch)[1] - self.recompute_s(shape, microbatch)
        share = self.model.weight_gradient_shares[0]
        return share / (1 + share) * backward_s

    def recompute_s(self, shape: StageShape, microbatch: MicroBatchShape) -> float:
        """Return the seconds of a backward in which a stage recomputes activations."""
        again = float(shape.recomputed_layers)
        if shape.selective_layers:
            again += self.selective_share(shape, microbatch) * shape.selective_layers
        if not again:
            return 0.0
        return again / shape.num_layers * self.compute_s(shape.inner, microbatch)[0]

    def selective_share(self, shape: StageShape, microbatch: MicroBatchShape) -> float:
        """Return the share of a layer's forward that selective recomputation repeats."""
        traffic_s = self.layer_traffic_s(shape, sum(microbatch))
        traffic = traffic_s / self.compute_s(shape.layer, microbatch)[0] if traffic_s else 0.0
        return _SELECTIVE_SHARE * (1 - traffic) + _TRAFFIC_AGAIN * traffic

    def layer_bytes(self, shape: StageShape) -> tuple[float, float]:
        """Return bytes per token of one of a stage's layers: kept, and its input if recomputed."""
        kept, factor = self.activation_bytes(shape.layer, 1), self.layout.activation_factor
        return factor * kept, factor * min(kept, self._hidden_bytes(1))

    def selective_bytes(self, shape: StageShape) -> float:
        """Return the bytes per token of a stage's layer that is recomputed selectively."""
        kept, of_input = self.layer_bytes(shape)
        if not self.layout.selective:
            return kept
        products = self.layout.activation_factor * self.products_bytes(shape.layer)
        return min(kept, of_input + products)

    def activation_s(self, sender: StagePlan, receiver: StagePlan, num_tokens: int) -> float:
        """Return the seconds in which an activation or its gradient goes to the next stage.

        Each rank sends to its counterpart. A larger group gets it in pieces, several from one
        sender, and puts them together over its own links; see `exchange.neighbours`.
        """
        if sender.ranks == receiver.ranks:
            return 0.0  # The same ranks run both stages, so nothing is sent.
        num_bytes, count = self._hidden_bytes(num_tokens), receiver.tp_degree
        first, other, part = sender.ranks[0], receiver.ranks[0], num_bytes / count
        if count <= sender.tp_degree:
            return self.transfer_s(first, other, num_bytes)
        sent = -(-count // sender.tp_degree) * self.transfer_s(first, other, part)
        gathered = (count - 1) * self.transfer_s(other, receiver.ranks[1], part)
        return sent + gathered

    def num_stage_params(self, shape: StageShape) -> float:
        """Return the number of trainable parameters that one rank of a stage holds."""
        params = shape.num_layers * self.model.params_per_layer
        params += self._copied_params(shape, trains=True)
        if shape.has_embedding:
            params += self.model.embedding_params
        if shape.has_head:
            params += self.model.head_params
        if shape.has_embedding and shape.has_head:
            params -= self.model.tied_params
        return params / shape.tp_degree

    def frozen_bytes(self, shape: StageShape) -> float:
        """Return the bytes of what never trains on one rank of a stage.

        They include the values of the largest quantized matrix, which is unpacked for a product.
        """
        model, width = self.model, self.layout.weight_bytes
        layer, embedding, head = model.frozen_bytes(width)
        held = shape.num_layers * layer + shape.has_embedding * embedding + shape.has_head * head
        held += width * self._copied_params(shape, trains=False)
        if shape.has_embedding and shape.has_head and model.tied_embeddings:
            held -= min(embedding, head, width * model.vocab_size * model.hidden_size)
        return (held + width * model.dequantized_params()[1]) / shape.tp_degree

    def owned_params(
        self, plan: ParallelPlan, stage: StagePlan, shape: StageShape | None = None
    ) -> float:
        """Return the largest number of parameters that any rank of a stage owns."""
        if plan.owner_shares is None or not self.layout.sharded:
            return self.num_owned_params(shape or self.shape_of(stage), plan.num_pipelines)
        shares = plan.owner_shares
        return max(shares[rank] for rank in stage.ranks) * self._params_a_share(shares)

    def idle_bytes(self, plan: ParallelPlan, rank: int) -> float:
        """Return the bytes that a rank without layers needs under a plan with owner shares."""
        assert plan.owner_shares is not None
        owned = plan.owner_shares[rank] * self._params_a_share(plan.owner_shares)
        layout, is_here = self.layout, rank not in plan.host_owners
        buffers = push_buffer_bytes(0.0, owned, plan.num_pipelines, layout.pushed_bytes)
        return owned * layout.device_kept_bytes * is_here + buffers

    def _params_a_share(self, shares: tuple[float, ...]) -> float:
        """Return the parameters that an owner share of 1 stands for; cached for the last plan."""
        if self._last_shares[0] is not shares:
            self._last_shares = shares, self.model.num_params / sum(shares)
        return self._last_shares[1]

    def num_owned_params(self, shape: StageShape, num_pipelines: int) -> float:
        """Return the parameters that one rank of a stage owns if holders own equal parts."""
        copied = self._copied_params(shape, trains=True) / shape.tp_degree
        held = self.num_stage_params(shape) - copied
        return held / num_pipelines if self.layout.sharded else held

    def _copied_params(self, shape: StageShape, *, trains: bool) -> int:
        """Return the copied parameters of key heads in a stage's group: trainable, or frozen."""
        if trains is not (self.model.tuning is None):
            return 0
        return shape.num_layers * self.model.copied_params_per_layer(shape.tp_degree)

    def stage_memory(
        self,
        shape: StageShape,
        num_pipelines: int,
        microbatches: Sequence[MicroBatchShape],
        num_in_flight: int,
        *,
        owned_params: float | None = None,
    ) -> MemoryTerms:
        """Return the peak of one rank with `num_in_flight` micro-batches in flight.

        Args:
            shape: Its stage.
            num_pipelines: Pipelines of the plan.
            microbatches: The micro-batches of its pipeline.
            num_in_flight: Micro-batches that it holds at once.
            owned_params: Parameters that it owns; None if a layer's holders share them alike.
        """
        held = in_flight_tokens(microbatches, min(num_in_flight, len(microbatches)))
        longest = max(map(sum, set(microbatches)), default=0)
        return self.memory_of_tokens(shape, num_pipelines, held, longest, owned_params=owned_params)

    def memory_of_tokens(
        self,
        shape: StageShape,
        num_pipelines: int,
        held_tokens: int,
        longest: int,
        *,
        owned_params: float | None = None,
    ) -> MemoryTerms:
        """Return the peak of one rank that holds the activations of these tokens at once.

        Args:
            shape: Its stage.
            num_pipelines: Pipelines of the plan.
            held_tokens: Tokens of all micro-batches in flight.
            longest: Tokens of the longest micro-batch.
            owned_params: Parameters that it owns; None if a layer's holders share them alike.
        """
        key = (shape, num_pipelines, held_tokens, longest, owned_params)
        found = self._peaks.get(key)
        if found is None:
            layout, held, owned = self.layout, self.num_stage_params(shape), owned_params
            if owned is None:
                owned = self.num_owned_params(shape, num_pipelines)
            buffers = push_buffer_bytes(held, owned, num_pipelines, layout.pushed_bytes)
            kept_bytes = 0 if shape.owns_on_host else layout.device_kept_bytes
            if not kept_bytes:
                # The sums of one layer at a time, on their way to the host.
                buffers += _SUM_BYTES * min(owned, self.model.params_per_layer)
            passing = self.passing_memory(shape, held_tokens, longest)
            found = self._peaks[key] = passing.with_states(
                weights=held * layout.weight_bytes,
                gradients=held * layout.summed_bytes,
                owned=owned * kept_bytes,
                buffers=buffers if layout.sharded else 0.0,
            )
        return found

    def passing_memory(self, shape: StageShape, held_tokens: int, longest: int) -> MemoryTerms:
        """Return the terms of micro-batches while they are computed, and of frozen weights."""
        factor, (kept, of_input) = self.layout.activation_factor, self.layer_bytes(shape)
        selective = self.selective_bytes(shape) if shape.selective_layers else of_input
        saved = shape.recomputed_layers * (kept - of_input)
        saved += shape.selective_layers * (kept - selective)
        # The first layers are recomputed: when backward reaches them, kept layers have been freed.
        has_kept = shape.recomputed_layers + shape.selective_layers < shape.num_layers
        again = 0.0 if has_kept else kept - selective
        sent = 0 if shape.has_head else self._hidden_bytes(held_tokens)
        # Three things are kept: the activations that were sent to the next stage, memory for their
        # gradients, and the gradients that were sent to the previous stage, which has one more
        # micro-batch in flight. Memory for activations to receive is allocated only when they
        # arrive.
        before = 0 if shape.has_embedding else self._hidden_bytes(held_tokens + longest)
        return MemoryTerms(
            frozen=self.frozen_bytes(shape),
            activations=factor * self.activation_bytes(shape, held_tokens) - saved * held_tokens,
            recomputed=again * longest,
            head=factor * self.transient_bytes(shape, longest),
            messages=factor * (2 * sent + before),
        )

    def update_s(self, shape: StageShape, owned_params: float) -> float:
        """Return the seconds of the optimizer's step on one rank of a stage."""
        key = (shape, owned_params)
        found = self._updates.get(key)
        if found is None:
            on_host = shape.owns_on_host or self.layout.host_owned
            step_s = self.host_step_s if on_host else self.step_s
            found = self._updates[key] = step_s(shape, owned_params * self.layout.num_copies)
        return found

    def host_step_s(self, shape: StageShape, num_owned: float) -> float:
        """Return the seconds of a step on the host: copy sums there, run Adam, copy weights back.

        The steps of all devices of a node run at once and share the host's memory bandwidth.
        """
        nodes = [node for node in self.cluster.nodes if node.device == shape.device]
        rate = min(node.host_memory_bytes_per_s / node.count for node in nodes)
        moved = _SUM_BYTES + self.layout.weight_bytes
        link = self.device(shape.device).host_bytes_per_s
        return num_owned * (moved / link + _HOST_STEP_BYTES / rate)

    def usable_bytes(self, device: str) -> float:
        """Return the memory of a device that a plan may fill."""
        return usable_bytes(self.device(device).memory_bytes)

    def _hidden_bytes(self, num_tokens: int) -> int:
        """Return the bytes of a hidden state, whose values are as wide as weights."""
        return self.model.hidden_bytes(num_tokens, self.layout.weight_bytes)

    def _find_shape(self, stage: StagePlan) -> StageShape:
        if max(stage.ranks) >= len(self.node_of_rank):
            raise PlanError(
                f"The plan names rank {max(stage.ranks)} but the cluster has "
                f"{len(self.node_of_rank)} devices. Give the plan's own cluster file."
            )
        if stage.layers.stop > self.model.num_layers:
            raise PlanError(
                f"The plan has layer {stage.layers.stop - 1} but {self.model.name} has "
                f"{self.model.num_layers} layers. Name the model that the plan was made for."
            )
        whole, selective = stage.recomputed_layers or 0, stage.selective_layers or 0
        if not self.layout.selective:
            whole, selective = whole + selective, 0
        names = {self.cluster.nodes[self.node_of_rank[rank]].device for rank in stage.ranks}
        links = [self.link(stage.ranks[0], rank) for rank in stage.ranks[1:]]
        return StageShape(
            device=min(names, key=self._rank_of_device),
            tp_degree=stage.tp_degree,
            num_layers=len(stage.layers),
            has_embedding=stage.layers.start == 0,
            has_head=stage.layers.stop == self.model.num_layers,
            link=min(links, default=None),
            recomputed_layers=whole,
            selective_layers=selective,
        )

    def _rank_of_device(self, device: str) -> tuple[float, float, int, str]:
        """Return a sort key: a group's slowest device has the least.

        Of equally fast ones the smallest.
        """
        spec = self._specs[device]
        return self._speed(device), spec.memory_bytes_per_s, spec.memory_bytes, device

    def _speed(self, device: str) -> float:
        return self._specs[device].flops_per_s(self.layout.computes_in)
