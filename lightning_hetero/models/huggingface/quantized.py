"""Read quantized weights of a Hugging Face model one by one, or quantize each while it is read.

A quantized weight is an object of its library, which only its own module understands: it is read
whole, by the ranks that compute with it. Its parameter on the meta device knows how, by the
attribute `whole_reader`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.model_config import read_quantization
from lightning_hetero.exchange.slices import PackedSize
from lightning_hetero.models.stored import StoredTensor

_TORCHAO = "torchao"
_BY_ROWS = ("Int8", "Float8", "Intx")
"""Beginnings of names of torchao's configs that may quantize each row as if it were alone."""
_RUN_NUMEL = 2**18
"""Largest number of values that are quantized at a time; more only if rows of whole blocks have
more."""


@dataclass(frozen=True, kw_only=True)
class WholeReader:
    """Reads one quantized weight."""

    name: str
    """Its name in the model."""
    like: nn.Parameter
    """The parameter on the meta device, with the options of its class."""
    stored: Mapping[str, StoredTensor]
    """Its weight, and what is stored beside it, by the names that its library uses."""
    size: PackedSize
    dtype: torch.dtype
    """The dtype of a weight that is quantized when it is read."""
    is_transposed: bool
    config: Any
    """What torchao's weights are quantized by."""
    metadata: Mapping[str, str]
    """What torchao's weights were stored with; empty for weights that are quantized when read."""

    def __call__(self) -> nn.Parameter:
        """Return the weight, on the CPU."""
        kind = type(self.like).__name__
        if kind == "Params4bit":
            return self._in_4_bits()
        if kind == "Int8Params":
            return self._in_8_bits()
        return self._by_torchao()

    def _found(self) -> dict[str, Tensor]:
        return {name: _read(tensor) for name, tensor in self.stored.items()}

    def _runs(self, most_numel: int | None = None) -> Iterator[Tensor]:
        """Yield the values in runs of rows that hold whole blocks of the 4-bit format.

        Quantizing takes several times their bytes, so a whole weight would take more memory than
        all that is kept.
        """
        stored = self.stored["weight"]
        num_rows, num_columns = stored.shape[::-1] if self.is_transposed else stored.shape
        block = getattr(self.like, "blocksize", 1)
        step = max(1, (most_numel or _RUN_NUMEL) // (num_columns * block)) * block
        for start in range(0, num_rows, step):
            box = ((start, min(start + step, num_rows)), (0, num_columns))
            values = stored.read(box[::-1] if self.is_transposed else box).to(self.dtype)
            yield values.T.contiguous() if self.is_transposed else values

    def _in_4_bits(self) -> nn.Parameter:
        kind = cast("Any", type(self.like))
        if len(self.stored) > 1:
            found = self._found()
            made = kind.from_prequantized(
                data=found.pop("weight"), quantized_stats=found, requires_grad=False, device="cpu"
            )
        else:
            made = self._to_4_bits(kind)
        assert isinstance(made, nn.Parameter)
        return made

    def _to_4_bits(self, kind: Any) -> Any:
        """Quantize run by run, with the same bits as `kind.to` makes of the whole weight."""
        from bitsandbytes.functional import quantize_4bit, quantize_blockwise

        options = {**vars(self.like), "module": None, "bnb_quantized": True}
        options.pop("whole_reader")
        given = {key: options[key] for key in ("blocksize", "quant_type", "quant_storage")}
        runs = [quantize_4bit(values, **given) for values in self._runs()]
        state, absmax = runs[0][1], torch.cat([state.absmax for _, state in runs])
        shape = self.stored["weight"].shape
        state.shape = torch.Size(shape[::-1] if self.is_transposed else shape)
        state.absmax = absmax
        if options["compress_statistics"]:
            state.nested, state.offset = True, absmax.mean()
            state.absmax, state.state2 = quantize_blockwise(absmax - state.offset, blocksize=256)
        options["quant_state"] = state
        return kind(torch.cat([packed for packed, _ in runs]), requires_grad=False, **options)

    def _in_8_bits(self) -> nn.Parameter:
        from bitsandbytes.functional import int8_vectorwise_quant

        if "SCB" in self.stored:
            found = self._found()
            values, scales = found["weight"], found["SCB"]
        else:
            runs = [int8_vectorwise_quant(values.half())[:2] for values in self._runs()]
            values, scales = (torch.cat(parts) for parts in zip(*runs, strict=True))
        kind = cast("Any", type(self.like))
        made = kind(values, requires_grad=False, has_fp16_weights=False, SCB=scales).to("cpu")
        assert isinstance(made, nn.Parameter)
        return made

    def _by_torchao(self) -> nn.Parameter:
        if not self.metadata:
            by_rows = _quantizes_by_rows(next(self._runs()), self.config)
            most = None if by_rows else self.size.num_values
            return _joined([_quantized_by_torchao(run, self.config) for run in self._runs(most)])
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        module = self.name.rpartition(".")[0]
        parts = {f"{module}.{name}": tensor for name, tensor in self._found().items()}
        weights, _ = unflatten_tensor_state_dict(parts, self.metadata)
        return nn.Parameter(weights[self.name], requires_grad=False)


def _quantized_by_torchao(values: Tensor, config: Any) -> Any:
    from torchao.quantization import quantize_

    alone = nn.Linear(1, 1, bias=False, device="meta")
    alone.weight = nn.Parameter(values, requires_grad=False)
    del values
    quantize_(alone, config)
    return alone.weight


def _quantizes_by_rows(values: Tensor, config: Any) -> bool:
    """Whether each row is quantized as if it were alone; it isn't if rows share a scale."""
    number = len(values) // 2
    if number == 0 or not type(config).__name__.startswith(_BY_ROWS):
        return False
    several, fewer = (_quantized_by_torchao(v, config) for v in (values, values[:number]))
    names, options = several.__tensor_flatten__()
    return fewer.__tensor_flatten__() == (names, options) and all(
        type(part := getattr(several, name)) is Tensor
        and part.shape[:1] == several.shape[:1]
        and torch.equal(*map(_bits, (part[:number], getattr(fewer, name))))
        for name in names
    )


def _bits(part: Tensor) -> Tensor:
    return part.contiguous().view(torch.uint8)  # torch doesn't compare float8.


def _joined(runs: list[Any]) -> nn.Parameter:
    """Return one of torchao's weights out of runs of its rows."""
    if len(runs) == 1:
        return nn.Parameter(runs[0], requires_grad=False)
    names, options = runs[0].__tensor_flatten__()
    parts = {name: torch.cat([getattr(run, name) for run in runs]) for name in names}
    shape = torch.Size((sum(map(len, runs)), *runs[0].shape[1:]))
    whole = type(runs[0]).__tensor_unflatten__(parts, options, shape, None)
    return nn.Parameter(whole, requires_grad=False)


def _read(tensor: StoredTensor) -> Tensor:
    return tensor.read(tuple((0, size) for size in tensor.shape))


class Quantizer:
    """Transformers' quantizer of one model on the meta device.

    Args:
        model: The model, whose linear modules it replaces.
        config: The `quantization_config`: transformers' object, or a folder's mapping.
        is_stored: Whether the folder's weights are quantized already.

    Raises:
        ModelError: The library isn't installed, or the method can't be read weight by weight.
    """

    def __init__(self, model: PreTrainedModel, config: Any, *, is_stored: bool) -> None:
        settings = config if isinstance(config, Mapping) else config.to_dict()
        tuning = read_quantization({"quantization_config": settings}, type(model).__name__)
        assert tuning is not None
        assert tuning.stored_bits is not None
        self._bits = tuning.stored_bits
        self._is_stored = is_stored
        try:
            self._quantizer = AutoHfQuantizer.from_config(config, pre_quantized=is_stored)
            self._quantizer.validate_environment(device_map={"": "cpu"})
            self._quantizer.preprocess_model(model=model, device_map={"": "cpu"})
        except ImportError as error:
            raise ModelError(
                f"{type(model).__name__} is to be quantized by {tuning.method}, whose library is "
                f"missing: {error}. Install it: pip install 'lightning-hetero[bnb]' or torchao."
            ) from error
        self._quantizer.postprocess_model(model)
        method = settings.get("quant_method", "bitsandbytes")
        self._method = str(getattr(method, "value", method))
        self._model = model
        self._names = [
            name
            for name, _ in model.named_parameters()
            if self._quantizer.param_needs_quantization(model, name)
        ]
        if self._method not in ("bitsandbytes", _TORCHAO):
            raise ModelError(
                f"{type(model).__name__} is quantized by {self._method}, which can't be read "
                "weight by weight. Use BitsAndBytesConfig or TorchAoConfig."
            )
        if not self._names:
            raise ModelError(
                f"{type(model).__name__} has no layer that {self._method} quantizes. Use another "
                "library (bitsandbytes also takes GPT-2's Conv1D), or no quantization."
            )

    def take(
        self, tensors: dict[str, StoredTensor], metadata: Mapping[str, str], dtype: torch.dtype
    ) -> dict[str, StoredTensor]:
        """Give the meta parameters of quantized weights their readers; return the other tensors.

        Args:
            tensors: All stored tensors, by the model's names, with those beside a weight.
            metadata: Of the folder's files.
            dtype: The dtype in which weights are quantized.

        Raises:
            ModelError: The folder lacks a weight.
        """
        left = dict(tensors)
        for name in self._names:
            module = name.rpartition(".")[0]
            beside = (f"{name}.", f"{module}.SCB", f"{module}._weight_")
            own = {key: item for key, item in left.items() if key == name or key.startswith(beside)}
            if not own:
                raise ModelError(f"The folder lacks {name}, a quantized weight. Copy it again.")
            left = {key: item for key, item in left.items() if key not in own}
            parameter = self._model.get_parameter(name)
            place = self._model.get_submodule(module)
            settings = self._quantizer.quantization_config
            vars(parameter)["whole_reader"] = WholeReader(
                name=name,
                like=parameter,
                stored={key.removeprefix(f"{module}."): item for key, item in own.items()},
                size=PackedSize(parameter.numel(), int(parameter.numel() * self._bits / 8)),
                dtype=dtype,
                is_transposed=issubclass(getattr(place, "source_cls", nn.Linear), Conv1D),
                config=settings.get_apply_tensor_subclass() if self._method == _TORCHAO else None,
                metadata=metadata if self._is_stored and self._method == _TORCHAO else {},
            )
            parameter.requires_grad_(False)
        return {key: item for key, item in left.items() if not key.endswith(".weight_format")}
