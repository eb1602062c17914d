"""Write `docs/files.md`: every field of cluster, model, plan and profile files.

All is taken from the dataclasses: their fields, types, defaults, and the texts below the fields.
"""

import ast
import inspect
import textwrap
import types
import typing
from dataclasses import MISSING, Field, fields
from typing import Any

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import KNOWN_DEVICES, DeviceSpec
from lightning_hetero.core.model_spec import KNOWN_MODELS, ModelSpec
from lightning_hetero.core.plan import ParallelPlan, PipelinePlan, StagePlan
from lightning_hetero.core.profile import BlockTimes, DeviceProfile, LayerMemory, LinkTimes, Profile
from lightning_hetero.core.reading import unit_of_field

_INTRODUCTION = """# Cluster, model, plan and profile files

Cluster and model files are YAML, plans and profiles JSON. An unknown, misspelt or duplicate key is
an error, which says where in the file it is. Numbers of bytes, bytes per second, FLOP/s and seconds
may have a unit: `80 GiB`, `12.5 GB/s`, `400 Gbit/s`, `312 TFLOP/s`, `20 us`. A number without a
unit is in the unit of its field.

`make docs` generates this page from the dataclasses.
"""
_FILES = (
    (
        "A cluster file",
        (Cluster, Node, Link, DeviceSpec),
        """```yaml
nodes:
  - {device: A100-80GB, count: 4, price_per_hour: 16}
  - {device: H100, count: 8}
  - {device: mine, count: 2}
inter_node_bytes_per_s: 400 Gbit/s
links:
  - {nodes: [0, 1], bytes_per_s: 12.5 GB/s, latency_s: 20 us}
devices:
  - name: mine
    peak_flops_per_s: 100 TFLOP/s
    memory_bytes: 16 GiB
    memory_bytes_per_s: 500 GB/s
    intra_node_bytes_per_s: 20 GB/s
```""",
    ),
    (
        "A model file",
        (ModelSpec,),
        """```yaml
name: mine
num_layers: 24
hidden_size: 2048
num_heads: 16
num_kv_heads: 4
intermediate_size: 8192
vocab_size: 50000
gated_mlp: true
tied_embeddings: false
```

`--model` also takes a Hugging Face `config.json`, a folder that has one, and the name of a Hugging
Face model in the local cache.""",
    ),
    (
        "A plan file",
        (ParallelPlan, PipelinePlan, StagePlan),
        """```json
{"pipelines": [
  {"stages": [{"ranks": [0, 1], "layers": [0, 4]}], "num_microbatches": 5},
  {"stages": [{"ranks": [2], "layers": [0, 1]}, {"ranks": [3], "layers": [1, 4]}]}
]}
```

Layers `[0, 4]` are layers 0 to 3: the end is exclusive, where tables print `0-3`. In LightningCLI
YAML a plan is written the same way.""",
    ),
    (
        "A profile file",
        (Profile, DeviceProfile, BlockTimes, LayerMemory, LinkTimes),
        "`lightning-hetero profile` writes it, with `format`, the version of the format, besides.",
    ),
)


def reference() -> str:
    """Return the page."""
    parts = [_INTRODUCTION]
    for title, schemas, example in _FILES:
        parts.append(f"## {title}\n\n{example}\n")
        parts += [_section(schema) for schema in schemas]
    parts.append(_devices())
    parts.append(f"## Known models\n\n{', '.join(f'`{name}`' for name in sorted(KNOWN_MODELS))}.\n")
    return "\n".join(parts)


def _section(schema: type) -> str:
    summary = inspect.cleandoc(schema.__doc__ or "").split("\n\n")[0].replace("\n", " ")
    texts = _texts(schema)
    hints = typing.get_type_hints(schema)
    rows = [
        f"| `{item.name}` | {_kind(hints[item.name], item.name)} | {_default(item)} "
        f"| {texts[item.name]} |"
        for item in fields(schema)
        if item.init
    ]
    header = "| key | holds | default | |\n|---|---|---|---|"
    return f"### {schema.__name__}\n\n{summary}\n\n{header}\n" + "\n".join(rows) + "\n"


def _texts(schema: type) -> dict[str, str]:
    """Return the string below each field."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(schema))).body
    assert isinstance(body, ast.ClassDef)
    texts = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and is_text:
            texts[field.target.id] = " ".join(str(text.value.value).split()).replace("|", "\\|")
    return texts


def _kind(hint: Any, name: str) -> str:
    """Return what a field holds, in words."""
    origin, items = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        (hint,) = (item for item in items if item is not types.NoneType)
        return _kind(hint, name)
    if origin is tuple:
        if items[-1] is ...:
            return f"list of {_kind(items[0], name)}"
        return f"list of {len(items)}: {_kind(items[0], name)}"
    if origin is not None:
        return f"mapping of {_kind(items[0], '')} to {_kind(items[1], name)}"
    unit = unit_of_field(name)
    words = {
        int: "whole number",
        float: "number",
        bool: "true or false",
        str: "text",
        range: "[first, last + 1]",
    }
    if hint in words:
        return words[hint] + (f", {unit}" if unit is not None else "")
    return f"[{hint.__name__}](#{hint.__name__.lower()})" if hint in _SCHEMAS else hint.__name__


_SCHEMAS = {schema for _, schemas, _ in _FILES for schema in schemas}


def _default(item: "Field[Any]") -> str:
    if item.default is MISSING:
        return "needed"
    if item.default is None or item.default == ():
        return "none"
    if isinstance(item.default, bool):
        return str(item.default).lower()
    return f"{item.default:g}" if isinstance(item.default, float) else str(item.default)


def _devices() -> str:
    rows = [
        f"| `{d.name}` | {d.peak_flops_per_s / 1e12:.0f} | {d.memory_bytes / 2**30:.0f} "
        f"| {d.memory_bytes_per_s / 1e9:,.0f} | {d.intra_node_bytes_per_s / 1e9:.0f} |"
        for d in KNOWN_DEVICES.values()
    ]
    header = "| name | TFLOP/s | GiB | GB/s | GB/s to a peer |\n|---|---|---|---|---|"
    return (
        "## Known devices\n\nShort names (`H100`, `A100`: the one with 80 GB, `V100`: 16 GB) and "
        "those of drivers (`NVIDIA A100-SXM4-40GB`) are understood. Dense 16-bit peak, memory, its "
        "bandwidth, and the bandwidth to a peer in the node in one direction.\n\n"
        f"{header}\n" + "\n".join(rows) + "\n"
    )
