"""Measure this machine: `lightning-hetero profile --model llama-7b --output profile.json`.

On several ranks it also measures messages. For each kind of link it takes the first two ranks that
have one, one pair at a time. A small and a large message go back and forth: the difference of their
times gives the bandwidth, the rest is latency.
"""

import argparse
import dataclasses
import os
import socket

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from lightning_hetero.cli.arguments import add_model_argument, check_folder_of, model_of
from lightning_hetero.core.devices import canonical_name
from lightning_hetero.core.errors import ProfileError
from lightning_hetero.core.profile import LinkTimes, Profile
from lightning_hetero.runtime.setup.detect import describe_device
from lightning_hetero.runtime.setup.profiling import ProfileOptions, measure_profile
from lightning_hetero.straggler.events import Pair
from lightning_hetero.straggler.probe import probe_links

_SMALL_BYTES = 1024
_LARGE_BYTES = 8 * 2**20
_INSIDE, _BETWEEN = "inside the node", "between nodes"


def measure_links(
    device: torch.device,
    *,
    node: str | None = None,
    num_bytes: tuple[int, int] = (_SMALL_BYTES, _LARGE_BYTES),
    repeats: int = 5,
) -> dict[str, LinkTimes]:
    """Measure messages; collective over all ranks of the default process group.

    Returns the links "inside the node" and "between nodes", as far as two ranks have one.

    Args:
        device: Where this rank's messages are stored.
        node: Name of this rank's node, if it emulates one.
        num_bytes: Sizes of the small and the large message.
        repeats: Messages per size and pair; the quickest counts.
    """
    own = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    nodes: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(nodes, node or own)
    found = {where: _first_pair(nodes, same=where == _INSIDE) for where in (_INSIDE, _BETWEEN)}
    pairs = {where: pair for where, pair in found.items() if pair is not None}
    rounds = [[pair] for pair in pairs.values()]
    small, large = (
        probe_links(rounds, device, num_bytes=size, repeats=repeats) for size in num_bytes
    )
    links = {}
    for where, pair in pairs.items():
        # Because of noise a large message may seem as quick as a small one.
        longer_s = max(large[pair] - small[pair], 0.01 * large[pair])
        links[where] = LinkTimes(
            bytes_per_s=2 * (num_bytes[1] - num_bytes[0]) / longer_s, latency_s=small[pair] / 2
        )
    return links


def _first_pair(nodes: list[str], *, same: bool) -> Pair | None:
    """Return the first two ranks on one node, or on two nodes; None if there are none."""
    pairs = ((a, b) for b in range(len(nodes)) for a in range(b))
    return next((pair for pair in pairs if (nodes[pair[0]] == nodes[pair[1]]) == same), None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.description = (
        "Measure the layers of a model on this machine's device and write a profile. Started by "
        "torchrun on several ranks (torchrun --nproc-per-node 2 -m lightning_hetero.cli profile "
        "...), it also measures messages inside a node and between nodes. Rank 0 measures the "
        "layers."
    )
    add_model_argument(parser)
    parser.add_argument("--output", metavar="FILE", required=True, help="JSON file to write")
    for name, metavar, what in (
        (
            "--device-name",
            "NAME",
            "name of the device type in cluster files (default: what CUDA reports, or cpu)",
        ),
        ("--device", "DEVICE", "where to measure (default: cuda if there is one)"),
        (
            "--merge",
            "FILE",
            "profile of other device types, whose measurements are written into the same file",
        ),
    ):
        parser.add_argument(name, metavar=metavar, help=what)
    for name, metavar, default, what in (
        (
            "--sequence-lengths",
            "TOKENS",
            [512, 1024, 2048, 4096],
            "lengths of the sequences to measure",
        ),
        ("--tp-degrees", "DEGREE", [1], "TP degrees to measure"),
    ):
        text = f"{what} (default: {' '.join(map(str, default))})"
        parser.add_argument(name, metavar=metavar, type=int, nargs="+", default=default, help=text)
    for name, metavar, most, what in (
        ("--max-block", "LAYERS", 8, "largest number of layers that are timed together"),
        ("--repeats", "NUMBER", 5, "repeats of each measurement; the median counts"),
    ):
        text = f"{what} (default: {most})"
        parser.add_argument(name, metavar=metavar, type=int, default=most, help=text)


def run_profile(arguments: argparse.Namespace) -> int:
    """Measure, print the results and write the file."""
    model = model_of(arguments)
    merged_with = Profile.load(arguments.merge) if arguments.merge else None
    check_folder_of(arguments.output, "--output")
    device = _device(arguments.device)
    links, writes = _measure_links(device)
    if not writes:
        return 0
    options = ProfileOptions(
        microbatches=tuple((length,) for length in arguments.sequence_lengths),
        tp_degrees=tuple(arguments.tp_degrees),
        max_block=arguments.max_block,
        num_repeats=arguments.repeats,
    )
    spec = describe_device(device)
    name = arguments.device_name or (spec.name if device.type == "cuda" else device.type)
    console = Console()
    with console.status("measuring") as status:
        profile = measure_profile(
            model,
            options,
            device_name=name,
            device=device,
            report=lambda line: status.update(f"measuring {line}"),
        )
    measured = dataclasses.replace(
        profile.devices[0],
        # The table of known devices has its own facts.
        spec=dataclasses.replace(spec, name=name) if canonical_name(name) is None else None,
        inside_node=links.get(_INSIDE),
    )
    profile = dataclasses.replace(profile, devices=(measured,), between_nodes=links.get(_BETWEEN))
    console.print(_as_table(profile))
    for where, times in links.items():
        speed = f"{times.bytes_per_s / 1e9:.3g} GB/s after {times.latency_s * 1e6:.0f} µs"
        console.print(f"messages {where}: {speed}", highlight=False)
    (profile if merged_with is None else merged_with.merge(profile)).save(arguments.output)
    console.print(f"written to {arguments.output}", highlight=False)
    return 0


def _device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ProfileError(f"--device {name!r} isn't a device: {error}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ProfileError("--device cuda, but this machine has no CUDA device. Use --device cpu.")
    if device.type == "cuda" and name in (None, "cuda") and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device


def _measure_links(device: torch.device) -> tuple[dict[str, LinkTimes], bool]:
    """Measure messages among torchrun's ranks; return the links, and if this rank goes on."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return {}, True
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        return measure_links(device), dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def _as_table(profile: Profile) -> Table:
    measured = profile.devices[0]
    table = Table(title=f"{profile.model.name} on {measured.device}, milliseconds")
    for column in ("TP", "tokens", "layers", "forward", "backward"):
        table.add_column(column, justify="right")
    for times in measured.times:
        for size, (forward, backward) in times.blocks.items():
            cells = (str(times.tp_degree), str(sum(times.lengths)), str(size))
            table.add_row(*cells, f"{forward * 1e3:.3f}", f"{backward * 1e3:.3f}")
    return table
