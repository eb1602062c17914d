"""Which calls of a model's layers stages can carry; others are refused by name.

Stages need a chain: each layer is called once, in order, where autograd sees it.
"""

import traceback

import torch
from torch.utils.checkpoint import CheckpointFunction

from lightning_hetero.core.errors import ModelError, StepError
from lightning_hetero.runtime.stage.microbatch_pass import MicrobatchPass

__all__ = ["check_finished", "check_order", "note_checkpoint"]


def note_checkpoint(run: MicrobatchPass, index: int) -> None:
    """Note that autograd doesn't see a layer for the time being.

    Raises:
        ModelError: The pipeline has several stages.
    """
    if run.with_gradients and not torch.is_grad_enabled() and _is_checkpointed_reentrantly():
        run.is_reentrant = True
        if run.has_stages:
            raise ModelError(
                f"Layer {index} runs in torch.utils.checkpoint with use_reentrant=True, which "
                "hides from a stage what it computes. Use use_reentrant=False, or leave the "
                "checkpoints out: HeteroStrategy(activation_checkpointing='full')."
            )


def check_order(run: MicrobatchPass, index: int) -> None:
    """Note that a layer is called.

    Raises:
        StepError: The model is called a second time.
        ModelError: It isn't the next layer's turn.
    """
    if run.finished and index == 0:
        raise StepError(
            "The step calls the model twice. Stages carry one pass of each micro-batch: call the "
            "model once, for instance on the concatenation of both inputs, or use a plan whose "
            "pipelines have one stage."
        )
    if index != len(run.called):
        behind = f"behind layer {run.called[-1]}" if run.called else "first"
        raise _no_chain(f"Layer {index} is called {behind}")
    run.called.append(index)


def check_finished(run: MicrobatchPass) -> None:
    """Refuse a step that has ended without all layers of a stage.

    Raises:
        StepError: It called none.
        ModelError: It called some.
    """
    if run.finished:
        return
    if not run.called:
        raise StepError(
            "The step returned without calling the model's layers. Call the model once in it."
        )
    raise _no_chain(f"The step ends with layer {run.called[-1]} of {run.num_layers}")


def _no_chain(what: str) -> ModelError:
    return ModelError(
        f"{what}, but stages and tensor parallelism need a chain: all layers of the list, each "
        "called once, in order. For layers that are reused, chosen or left out use a plan whose "
        "pipelines have one stage, or name the list that is a chain: "
        'HeteroStrategy(layers="model.blocks").'
    )


def _is_checkpointed_reentrantly() -> bool:
    """Whether this is called inside of `torch.utils.checkpoint` with use_reentrant=True."""
    forward = CheckpointFunction.forward.__code__
    return any(frame.f_code is forward for frame, _ in traceback.walk_stack(None))
