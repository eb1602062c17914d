"""Read quantized weights of a Hugging Face model one by one, or quantize each while it is read.

A quantized weight is an object of its library, which only its own module understands: it is read
whole, by the ranks that compute with it. Its parameter on the meta device knows how, by the
attribute `whole_reader`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.model_config import read_quantization
from lightning_hetero.core.slices import PackedSize
from lightning_hetero.models.stored import StoredTensor

__all__ = ["Quantizer", "WholeReader", "add_adapters"]

_TORCHAO = "torchao"


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
        found = {name: _read(tensor) for name, tensor in self.stored.items()}
        kind = type(self.like).__name__
        if kind == "Params4bit":
            return self._in_4_bits(found)
        if kind == "Int8Params":
            return self._in_8_bits(found)
        return self._by_torchao(found)

    def _whole(self, weight: Tensor) -> Tensor:
        weight = weight.to(self.dtype)
        return weight.T.contiguous() if self.is_transposed else weight

    def _in_4_bits(self, found: dict[str, Tensor]) -> nn.Parameter:
        weight, kind = found.pop("weight"), cast("Any", type(self.like))
        if found:
            made = kind.from_prequantized(
                data=weight, quantized_stats=found, requires_grad=False, device="cpu"
            )
        else:
            options = {**vars(self.like), "module": None}
            options.pop("whole_reader")
            made = kind(self._whole(weight), requires_grad=False, **options).to("cpu")
        assert isinstance(made, nn.Parameter)
        return made

    def _in_8_bits(self, found: dict[str, Tensor]) -> nn.Parameter:
        weight, kind, scales = found["weight"], cast("Any", type(self.like)), found.get("SCB")
        whole = self._whole(weight) if scales is None else weight
        made = kind(whole, requires_grad=False, has_fp16_weights=False, SCB=scales).to("cpu")
        assert isinstance(made, nn.Parameter)
        return made

    def _by_torchao(self, found: dict[str, Tensor]) -> nn.Parameter:
        if not self.metadata:
            from torchao.quantization import quantize_

            alone = nn.Linear(1, 1, bias=False, device="meta")
            alone.weight = nn.Parameter(self._whole(found["weight"]), requires_grad=False)
            quantize_(alone, self.config)
            return alone.weight
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        module = self.name.rpartition(".")[0]
        parts = {f"{module}.{name}": tensor for name, tensor in found.items()}
        weights, _ = unflatten_tensor_state_dict(parts, self.metadata)
        return nn.Parameter(weights[self.name], requires_grad=False)


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
        if self._method not in ("bitsandbytes", _TORCHAO) or not self._names:
            raise ModelError(
                f"{type(model).__name__} is quantized by {self._method}, which can't be read "
                "weight by weight. Use BitsAndBytesConfig or TorchAoConfig."
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


def add_adapters(model: PreTrainedModel, config: Any) -> Any:
    """Return PEFT's model around one on the meta device, with adapters that are drawn on the CPU.

    Like `peft.get_peft_model`, which would leave them on the meta device, without values.

    Args:
        model: What `load_pretrained` returned; its own weights are frozen.
        config: PEFT's config, such as a `LoraConfig`.

    Raises:
        ModelError: The adapters' first values depend on those of weights.
    """
    import peft

    options = {name: getattr(config, name, None) for name in ("use_dora", "modules_to_save")}
    init = getattr(config, "init_lora_weights", True)
    if isinstance(init, str) and init != "gaussian":
        options["init_lora_weights"] = init
    if any(options.values()):
        given = {name: value for name, value in options.items() if value}
        raise ModelError(
            f"Adapters with {given} begin with values of weights, which are read only when the run "
            "starts. Leave these options out, or load the model whole with from_pretrained."
        )
    with _on_cpu_without_values(model):
        adapted = peft.get_peft_model(model, config)
    source = vars(model)["weight_source"]
    names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
    before = {name: name.replace(".base_layer", "") for name in names}
    tensors = {n: source.tensors[own] for n, own in before.items() if own in source.tensors}
    vars(model)["weight_source"] = replace(source, tensors=tensors)
    return adapted


@contextmanager
def _on_cpu_without_values(model: nn.Module) -> Iterator[None]:
    """Put CPU tensors that take no memory in the place of parameters on the meta device."""
    before = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    for module, name, parameter in before:
        empty = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
        kind = type(parameter)
        stand_in = torch.Tensor._make_subclass(kind, empty, False)
        vars(stand_in).update(vars(parameter))
        module._parameters[name] = stand_in
    try:
        yield
    finally:
        for module, name, parameter in before:
            parameter.requires_grad = False
            module._parameters[name] = parameter
