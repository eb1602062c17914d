"""An accelerator without hardware: its kernels compute on the CPU, and it knows who waits for it.

A tensor on it has memory, strides and an address of its own, as on any device. Its kernels hand the
same memory to the CPU's. As on CUDA

* tensors of two devices don't meet, but for numbers,
* what makes the host wait for the device is noted with where it was asked for: reading a value, a
  shape that depends on values, a copy to the host or a blocking one from it, `synchronize`.

Nothing is enqueued here: results are there at once, so a wait that is missing isn't found.

It takes torch's PrivateUse1 device for the rest of the process.
"""

import functools
import traceback
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor, library
from torch.utils import backend_registration
from torch.utils._pytree import tree_map

NAME = "accel"
IS_SUPPORTED = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
WHY_NOT = "this torch can't have a device whose kernels are written in Python"

_ROOT = Path(__file__).parents[2]
_CPU = torch._C.DispatchKey.CPU
_VIEWS = {"aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::set_"}
"""Look at shapes and strides alone, so that the CPU's kernels do it on any device."""
_BY_MASK = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
"""Wait only for indices that are masks."""


def note_use(what: str, reads: Any, writes: Any) -> None:
    """Called with each operation that reads or writes memory of the device; see `streams`."""


waits: list[tuple[str, str]] = []
"""What has made the host wait, and the lines of this repository that asked for it."""


def place() -> torch.device:
    return torch.device(NAME, 0)


def on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == NAME


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a tensor of the CPU in the same memory."""
    memory: Any = tensor.untyped_storage()
    form = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(memory.memory, *form)


def moved(tensor: Tensor) -> Tensor:
    """Return a tensor of the device in the memory of one of the CPU."""
    made: Tensor = torch._C._acc.create_empty_tensor((0,), tensor.dtype)
    _set(made, tensor)
    return made


def _set(made: Tensor, tensor: Tensor) -> None:
    memory = tensor.untyped_storage()
    storage: Any = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), place(), memory.nbytes()
    )
    storage.memory = memory  # It lives as long as what stands for it.
    form = tensor.storage_offset(), tensor.shape, tensor.stride()
    torch.ops.aten.set_.source_Storage_storage_offset._op_dk(_CPU, made, storage, *form)


def note_wait(what: str) -> None:
    """Note that the host waits for the device."""
    stack = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None))
    ours = islice(((name, line) for name, line in stack if _is_ours(name)), 4)
    asked = [f"{Path(name).relative_to(_ROOT)}:{line}" for name, line in ours]
    waits.append((what, " < ".join(asked)))


@functools.cache
def _is_ours(filename: str) -> bool:
    path = Path(filename)
    return _ROOT in path.parents and ".venv" not in path.parts and path != Path(__file__)


def _waits_for_values(func: Any, args: Any) -> bool:
    if func._schema.name in _BY_MASK:
        masks = (torch.bool, torch.uint8)
        return any(isinstance(item, Tensor) and item.dtype in masks for item in args[1])
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    return not tags.isdisjoint(func.tags)


def _compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation for which the device has no kernel of its own."""
    if func._schema.name in _VIEWS:
        return func._op_dk(_CPU, *args, **kwargs)
    if _waits_for_values(func, args):
        note_wait(func._schema.name)
    given: dict[int, tuple[Tensor, Tensor, tuple[Any, ...]]] = {}

    def enter(item: Any) -> Any:
        if on_device(item):
            twin = on_cpu(item)
            given[id(twin)] = twin, item, _form_of(twin)
            return twin
        if isinstance(item, Tensor) and item.ndim:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but {func} got {NAME} and "
                f"{item.device}."
            )
        is_place = isinstance(item, torch.device) and item.type == NAME
        return torch.device("cpu") if is_place else item

    made = func(*_each(enter, args), **{name: _each(enter, kwargs[name]) for name in kwargs})
    for twin, item, form in given.values():
        if _form_of(twin) != form:  # An output that was resized.
            _set(item, twin)

    def leave(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return given[id(item)][1] if id(item) in given else moved(item)

    left = _each(leave, made)
    _note(func, args, kwargs, left)
    return left


def _note(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    """Note what an operation reads and writes; views are neither, communications elsewhere."""
    schema = func._schema
    aliases = [item.alias_info for item in schema.returns if item.alias_info is not None]
    if schema.name.startswith("c10d::") or any(not item.is_write for item in aliases):
        return
    written = {item.name for item in schema.arguments if item.is_write}
    given = {**dict(zip((item.name for item in schema.arguments), args, strict=False)), **kwargs}
    reads = [value for name, value in given.items() if name not in written]
    writes = [value for name, value in given.items() if name in written]
    note_use(schema.name, reads, [*writes, made])


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Change each item of what an operation takes or gives."""
    kind = type(value)
    if kind is list or kind is tuple:
        return kind([_each(change, item) for item in value])
    return tree_map(change, value) if isinstance(value, tuple) else change(value)


def _form_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _make(func: Any) -> Callable[..., Tensor]:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        kwargs.pop("pin_memory", None)
        made = moved(func(*args, **(kwargs | {"device": torch.device("cpu")})))
        note_use("made", (), made)
        return made

    return make


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:  # noqa: FBT001, FBT002
    if on_device(source) is not on_device(target) and not non_blocking:
        note_wait("copy to the host" if on_device(source) else "blocking copy from the host")
    note_use("copy", source, target)
    ends = (on_cpu(item) if on_device(item) else item for item in (target, source))
    torch.ops.aten.copy_(*ends)
    return target


def _read(tensor: Tensor) -> Any:
    note_wait("read a value")
    note_use("read", tensor, ())
    return on_cpu(tensor).item()


def _communicate(func: Any) -> Callable[..., Any]:
    """Return a collective as gloo has it for the CPU; the host of an accelerator goes on."""
    is_flat = "_base_" in func._schema.name  # Of any shape, as under NCCL.

    def enter(item: Any) -> Any:
        if not on_device(item):
            return item
        return on_cpu(item).view(-1) if is_flat else on_cpu(item)

    def communicate(*args: Any, **kwargs: Any) -> Any:
        return func(*tree_map(enter, args), **kwargs)

    return communicate


class _Module(backend_registration._DummyBackendModule if IS_SUPPORTED else object):  # type: ignore[misc]
    """`torch.accel`."""

    def synchronize(self, device: Any = None) -> None:
        note_wait("synchronize")

    def set_device(self, device: Any) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def manual_seed(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass


_libraries: list[library.Library] = []


def install() -> None:
    """Make the device in this process, once."""
    if _libraries:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    dist.Backend.backend_capability["gloo"].append(NAME)
    everything, aten, c10d = (library.Library(name, "IMPL") for name in ("_", "aten", "c10d"))
    _libraries.extend((everything, aten, c10d))
    everything.fallback(_compute, "PrivateUse1")
    ops = torch.ops.aten
    aten.impl("empty.memory_format", _make(ops.empty.memory_format), "PrivateUse1")
    aten.impl("empty_strided", _make(ops.empty_strided.default), "PrivateUse1")
    aten.impl("_copy_from", _copy, "PrivateUse1")
    aten.impl("_local_scalar_dense", _read, "PrivateUse1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # It says that gloo had refused these.
        for name in (
            "allgather_",
            "_allgather_base_",
            "allreduce_",
            "alltoall_base_",
            "broadcast_",
        ):
            kernel = _communicate(getattr(torch.ops.c10d, name).default)
            c10d.impl(name, kernel, "PrivateUse1", allow_override=True)


class TestAccelerator(Accelerator):
    """What a Trainer needs to run on it."""

    __test__ = False

    def setup_device(self, device: torch.device) -> None:
        install()

    def teardown(self) -> None:
        pass

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [place()] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return NAME
