"""Measure this machine: `lightning-hetero profile --model llama-7b --output profile.json`."""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.model_spec import KNOWN_MODELS, ModelSpec
from lightning_hetero.core.profile import Profile
from lightning_hetero.core.time_fit import TimeFit
from lightning_hetero.runtime.profiling import ProfileOptions, measure_profile

__all__ = ["add_parser", "run_profile"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand's arguments."""
    parser = subparsers.add_parser(
        "profile",
        help="measure layer times and memory on this machine",
        description="Measure the layers of a model on this machine's device and write a profile.",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        required=True,
        help=f"a known name ({', '.join(sorted(KNOWN_MODELS))}), a YAML file of sizes or a "
        "Hugging Face config folder",
    )
    parser.add_argument("--output", metavar="FILE", required=True, help="JSON file to write")
    parser.add_argument(
        "--device-name",
        metavar="NAME",
        help="device type as cluster files name it (default: the name that CUDA reports)",
    )
    parser.add_argument(
        "--device", metavar="DEVICE", help="where to measure (default: cuda if there is one)"
    )
    parser.add_argument(
        "--sequence-lengths",
        metavar="TOKENS",
        type=int,
        nargs="+",
        default=[512, 1024, 2048, 4096],
        help="micro-batches of one sequence each (default: 512 1024 2048 4096)",
    )
    parser.add_argument(
        "--tp-degrees",
        metavar="DEGREE",
        type=int,
        nargs="+",
        default=[1],
        help="TP shards to measure (default: 1)",
    )
    parser.add_argument(
        "--max-block",
        metavar="LAYERS",
        type=int,
        default=8,
        help="largest block of layers (default: 8)",
    )
    parser.add_argument(
        "--repeats",
        metavar="NUMBER",
        type=int,
        default=5,
        help="repeats of which the median counts (default: 5)",
    )
    parser.add_argument(
        "--merge",
        metavar="FILE",
        help="a profile of other device types to write together with this one",
    )


def run_profile(arguments: argparse.Namespace) -> int:
    """Measure, print what was found and write the file."""
    model = ModelSpec.load(arguments.model)
    merged_with = Profile.load(arguments.merge) if arguments.merge else None
    output = Path(arguments.output)
    if not output.resolve().parent.is_dir():
        raise ProfileError(f"Can't write {output}: its folder doesn't exist. Create it first.")
    device = _device(arguments.device)
    options = ProfileOptions(
        microbatches=tuple((length,) for length in arguments.sequence_lengths),
        tp_degrees=tuple(arguments.tp_degrees),
        max_block=arguments.max_block,
        num_repeats=arguments.repeats,
    )
    console = Console()
    with console.status("measuring") as status:
        profile = measure_profile(
            model,
            options,
            device_name=arguments.device_name or _device_name(device),
            device=device,
            report=lambda line: status.update(f"measuring {line}"),
        )
    console.print(_as_table(profile))
    (profile if merged_with is None else merged_with.merge(profile)).save(output)
    console.print(f"written to {output}", highlight=False)
    return 0


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ProfileError(f"--device {name!r} is no device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ProfileError("--device cuda, but this machine has no CUDA device. Use --device cpu.")
    return device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _as_table(profile: Profile) -> Table:
    measured = profile.devices[0]
    table = Table(title=f"{profile.model.name} on {measured.device}, milliseconds")
    for column in ("TP", "tokens", "layers", "forward", "backward"):
        table.add_column(column, justify="right")
    for times in measured.times:
        for size, (forward, backward) in times.blocks.items():
            cells = (str(times.tp_degree), str(sum(times.lengths)), str(size))
            table.add_row(*cells, f"{forward * 1e3:.3f}", f"{backward * 1e3:.3f}")
    for degree in measured.tp_degrees:
        samples = [(t.lengths, sum(t.blocks[1])) for t in measured.at(degree)]
        fit = TimeFit.of(samples)
        table.add_row(
            str(degree),
            "l",
            "1",
            f"{fit.a * 1e3:.3g}·l²",
            f"+ {fit.b * 1e3:.3g}·l + {fit.c * 1e3:.3g}",
        )
    return table
