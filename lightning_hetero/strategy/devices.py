"""What a run asks of NCCL and of a device's queues before processes meet."""

from collections.abc import Mapping, MutableMapping

import torch

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["check_queues", "leave_failures_to_ranks"]


def check_queues(device: torch.device, environment: Mapping[str, str]) -> None:
    """Refuse a device with one hardware queue for all of its streams.

    Raises:
        ConfigurationError: `CUDA_DEVICE_MAX_CONNECTIONS` is 1.
    """
    if device.type == "cuda" and environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigurationError(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so all streams of a device share one hardware queue:"
            " a receive that waits for another rank holds up the computation after it, for which "
            "that rank may wait. Unset it, or set it to 8 or more; only Megatron-LM's overlap of "
            "tensor parallelism wants 1."
        )


def leave_failures_to_ranks(environment: MutableMapping[str, str]) -> None:
    """Have NCCL's groups neither abort by themselves nor end the process where a peer is lost.

    By default, and as torchrun sets it, torch does one or both. Ranks that go on in place abort
    their groups themselves, once they know what their devices have trained (`StepEnd`).
    """
    environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
