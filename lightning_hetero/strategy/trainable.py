"""Refuse modules and callbacks that would train wrongly, or not at all, under a plan.

The engine calls the steps and runs their backward passes itself; outside of these, parameters are
this rank's slices.
"""

import zlib
from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelPruning, ThroughputMonitor
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_hetero.core.errors import ConfigurationError, ModelError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.slices.frozen import STAYS_FROZEN, is_quantized
from lightning_hetero.runtime.stage.recomputation import is_compiled
from lightning_hetero.runtime.tensor_parallel.cuts import ModelCuts


def check_quantized(
    module: nn.Module,
    plan: ParallelPlan | None,
    *,
    layers: str | None,
    tp_plan: Mapping[str, str] | None,
) -> None:
    """Refuse quantized weights that are to train or to be cut, before processes are started.

    Args:
        module: The user's module; what `configure_model` adds is checked later, in `setup`.
        plan: The given plan; None if it is made later.
        layers: See `HeteroStrategy`.
        tp_plan: See `HeteroStrategy`.

    Raises:
        ModelError: A quantized weight is to be trained, or the plan cuts it.
    """
    found = {name: item for name, item in module.named_parameters() if is_quantized(item)}
    for name, parameter in found.items():
        if parameter.requires_grad:
            raise ModelError(STAYS_FROZEN.format(name))
    if found and plan is not None and plan.has_tensor_parallelism:
        ModelCuts.of(module, ModelLayout.of(module, layers=layers), tp_plan)


def check_trainable(module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
    """Refuse a module, or a callback, that can't train under a plan.

    Raises:
        ConfigurationError: The same on every rank.
    """
    if not module.automatic_optimization:
        raise ConfigurationError(
            "HeteroStrategy needs automatic optimization, because a step's backward runs inside "
            "the pipeline's schedule. Remove `self.automatic_optimization = False` and return the "
            "loss from training_step."
        )
    if type(module).backward is not pl.LightningModule.backward:
        raise ConfigurationError(
            f"{type(module).__name__} overrides backward, which HeteroStrategy never calls: the "
            "backward runs inside the pipeline's schedule. Put what it does into training_step, "
            "on_before_backward or on_after_backward."
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigurationError(
            "training_step takes a dataloader_iter, but each call of it gets one micro-batch of an "
            "iteration. Let it take a batch."
        )
    for name, part in module.named_modules():
        if is_compiled(part) and any(isinstance(item, nn.ModuleList) for item in part.modules()):
            raise ConfigurationError(
                f"{name or type(module).__name__} is compiled as a whole, but a stage runs only "
                "some of its layers. Leave torch.compile out and let each layer be compiled: "
                "HeteroStrategy(compile_layers=True)."
            )
        _check_embedding(name, part)
    check_parameter_hooks(module.named_parameters())
    if any(isinstance(callback, ModelPruning) for callback in callbacks):
        raise ConfigurationError(
            "ModelPruning masks whole parameters, but each rank has slices of them. Leave it out, "
            "and prune after a run with HeteroStrategy(whole_after_run=True)."
        )
    if any(isinstance(callback, ThroughputMonitor) for callback in callbacks):
        rank_zero_warn(
            "ThroughputMonitor takes each rank for a copy of the model with samples of its own. "
            "Where ranks share a pipeline, its rates are too high. RunMetrics logs the run's."
        )


def _check_embedding(name: str, part: nn.Module) -> None:
    if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
        return
    if part.scale_grad_by_freq:
        raise ConfigurationError(
            f"{name} has scale_grad_by_freq, which divides a row's gradient by how often a batch "
            "has it; here each micro-batch would divide by what it has itself. Leave it out."
        )
    if part.sparse:
        raise ConfigurationError(
            f"{name} makes sparse gradients, but ranks send whole rows of gradients to each other. "
            "Leave sparse=True out, and take an optimizer of dense gradients."
        )


def check_parameter_hooks(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks on a parameter's gradient, which no rank computes as a whole.

    Raises:
        ConfigurationError: The same on every rank.
    """
    for name, parameter in parameters:
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"Parameter {name} has a gradient hook (register_hook or "
                "register_post_accumulate_grad_hook), which would never run: ranks compute pieces "
                "of gradients and sum them where a slice of the parameter is owned. Change "
                "`parameter.grad` in on_before_optimizer_step, where it is this rank's slice, or "
                "change the weight in the module's forward, such as "
                "`torch.where(mask, weight.detach(), weight)` to train some rows only."
            )


def facts_of_fit(module: pl.LightningModule | None) -> dict[str, str]:
    """Return facts that must be equal in all processes; each finds its own before they connect."""
    # A joiner can only join in its script's first fit.
    facts = {"fits before this one": "some" if dist.is_initialized() else "none"}
    if module is None:
        return facts
    shapes = [(name, tuple(item.shape)) for name, item in module.named_parameters()]
    digest = zlib.crc32(repr(shapes).encode())
    found = f"{len(shapes)} of digest {digest:08x} in {type(module).__name__}"
    return {**facts, "parameters": found}
