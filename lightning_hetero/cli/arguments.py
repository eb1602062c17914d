"""Options that several subcommands share, and the checks that come before any work."""

import argparse
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.model_config import DEFAULT_RANK, QUANTIZATIONS
from lightning_hetero.core.model_spec import KNOWN_MODELS, ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.core.profile import Profile
from lightning_hetero.planner.scheduled import Scheduled, simulate_scheduled
from lightning_hetero.schedules import Schedule
from lightning_hetero.simulator import (
    CostModel,
    MicroBatchShape,
    ProfileCost,
    Simulation,
    StateLayout,
    choose_cost,
    split_batch,
)
from lightning_hetero.simulator.stage import PRECISIONS

_PICTURES = (".svg", ".png", ".pdf")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--model`, which takes what `ModelSpec.load` does, and the options of what trains."""
    parser.add_argument(
        "--model",
        metavar="NAME",
        required=True,
        help=f"a known name ({', '.join(sorted(KNOWN_MODELS))}), a YAML file of sizes, a Hugging "
        "Face config folder, the folder of a PEFT adapter, or the name of a Hugging Face model in "
        "the local cache",
    )
    parser.add_argument(
        "--quantize",
        metavar="FORMAT",
        choices=list(QUANTIZATIONS),
        help="freeze the matrices of layers and store them in this format: "
        f"{', '.join(QUANTIZATIONS)} (default: what the model's quantization_config says)",
    )
    parser.add_argument(
        "--lora-rank",
        metavar="NUMBER",
        type=int,
        help="train LoRA adapters of this rank on all matrices of layers, and freeze the rest "
        f"(default: none; {DEFAULT_RANK} for quantized models)",
    )


def model_of(arguments: argparse.Namespace) -> ModelSpec:
    """Return the sizes of the model that `add_model_argument`'s options describe."""
    model = ModelSpec.load(arguments.model)
    return model.tuned(quantize=arguments.quantize, lora_rank=arguments.lora_rank)


def add_workload_arguments(parser: argparse.ArgumentParser, *, size: str) -> None:
    """Add the options of planning and simulating: cluster, model, batch, precision, profile.

    `size` explains, in the help, the default "auto" of a micro-batch's size.
    """
    parser.add_argument(
        "--cluster", metavar="FILE", required=True, help="YAML file of nodes, devices and links"
    )
    add_model_argument(parser)
    for name, what in (
        ("--sequence-length", "tokens of a sample, 1 or more"),
        ("--global-batch-size", "samples of an iteration, 1 or more"),
    ):
        parser.add_argument(name, metavar="NUMBER", type=int, required=True, help=what)
    parser.add_argument(
        "--micro-batch-size",
        metavar="NUMBER",
        type=_size_or_auto,
        default="auto",
        help=f"samples of a micro-batch, or auto (default): {size}",
    )
    parser.add_argument(
        "--precision",
        choices=list(PRECISIONS),
        metavar="NAME",
        default="bf16-mixed",
        help="the Trainer's precision, which decides rates, memory and traffic: "
        f"{', '.join(PRECISIONS)} (default: bf16-mixed)",
    )
    parser.add_argument(
        "--schedule",
        choices=[str(schedule) for schedule in Schedule],
        default=str(Schedule.ONE_F_ONE_B),
        help="order of forward and backward passes, as in HeteroStrategy(schedule=...): 1f1b "
        "(default); split: computed, with gradients of weights in idle time; deep: split, and more "
        "micro-batches in flight; auto: deep where that saves 1 %%, else 1f1b",
    )
    parser.add_argument(
        "--redundancy",
        type=int,
        choices=[0, 1],
        default=0,
        help="number of standbys, ranks that store a copy of each weight and its optimizer state "
        "beside its owner, as in HeteroStrategy(redundancy=...) (default: 0)",
    )
    parser.add_argument(
        "--profile",
        metavar="FILE",
        help="JSON file that `lightning-hetero profile` wrote (default: data sheets)",
    )


def add_plot_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add `--plot`, which `check_picture` checks."""
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help=f"draw {what} into this .svg, .png or .pdf file, or an .html page that shows the "
        "numbers of each bar",
    )


def check_picture(path: str | None) -> None:
    """Refuse a picture, or page, that can't be drawn, before any work is done."""
    if path is None:
        return
    suffix = Path(path).suffix.lower()
    if suffix not in (*_PICTURES, ".html"):
        raise ConfigurationError(
            f"--plot is {path!r}; its name must end in {', '.join(_PICTURES)} or .html."
        )
    check_folder_of(path, "--plot")
    needed, extra = ("jinja2", "report") if suffix == ".html" else ("matplotlib", "plot")
    if importlib.util.find_spec(needed) is None:
        raise ConfigurationError(
            f"--plot needs {needed}, which isn't installed. Run: "
            f"pip install 'lightning-hetero[{extra}]'."
        )


def check_folder_of(path: str | None, option: str) -> None:
    """Refuse a file whose folder doesn't exist, before any work is done."""
    if path is None:
        return
    if not Path(path).resolve().parent.is_dir():
        raise ConfigurationError(
            f"Can't write {option} {path}: its folder doesn't exist. Create it first."
        )
    if Path(path).is_dir():
        raise ConfigurationError(f"Can't write {option} {path}: it is a folder. Name a file.")


def cost_of(arguments: argparse.Namespace) -> CostModel:
    """Read cluster, model and profile; without a profile use the data sheets of known devices."""
    for name in ("sequence_length", "global_batch_size", "micro_batch_size"):
        value = getattr(arguments, name)
        if value != "auto" and not 1 <= value <= 10**12:
            option = "--" + name.replace("_", "-")
            raise ConfigurationError(
                f"{option} is {value}; it must be 1 or more, and no more than 10¹²."
            )
    layout = StateLayout.of_precision(arguments.precision, redundancy=arguments.redundancy)
    profile = None if arguments.profile is None else Profile.load(arguments.profile)
    measured = () if profile is None else profile.device_specs
    cluster = Cluster.load(arguments.cluster, measured=measured)
    model = model_of(arguments)
    if profile is not None:
        profile.check(model=model)
    return choose_cost(cluster, model, profile, layout=layout)


class Prediction(NamedTuple):
    """A simulated iteration of a plan."""

    simulation: Simulation
    batches: Sequence[Sequence[MicroBatchShape]]
    """The micro-batches of each pipeline."""
    num_tokens: int
    """Tokens of all micro-batches."""
    scheduled: Scheduled
    """The schedule under which it was simulated."""


def predict(
    plan: ParallelPlan,
    cost: CostModel,
    arguments: argparse.Namespace,
    *,
    record_events: bool = False,
) -> Prediction:
    """Simulate a plan with the requested batch.

    Raises:
        ConfigurationError: The time is meaningless, such as for a device of 1e-300 FLOP/s.
    """
    batches = split_batch(
        plan,
        global_batch_size=arguments.global_batch_size,
        sequence_length=arguments.sequence_length,
        microbatch_size=_microbatch_size(plan, arguments),
    )
    scheduled = simulate_scheduled(
        plan, cost, batches, Schedule(arguments.schedule), record_events=record_events
    )
    simulation = scheduled.simulation
    if not math.isfinite(simulation.iteration_time_s):
        raise ConfigurationError(
            "An iteration would take forever. Check the rates of devices and links in the cluster "
            "file and the times of the profile."
        )
    num_tokens = sum(sum(map(sum, items)) for items in batches)
    return Prediction(simulation, batches, num_tokens, scheduled)


def _microbatch_size(plan: ParallelPlan, arguments: argparse.Namespace) -> int:
    """Return the samples of a micro-batch: as given, or the batch divided by the micro-batches.

    1 if the plan leaves a number of micro-batches open, or the numbers don't divide the batch.
    """
    if arguments.micro_batch_size != "auto":
        return int(arguments.micro_batch_size)
    counts = [pipeline.num_microbatches for pipeline in plan.pipelines]
    total = sum((p.num_microbatches or 0) * (p.microbatch_size or 1) for p in plan.pipelines)
    if None in counts or not total or arguments.global_batch_size % total:
        return 1
    return int(arguments.global_batch_size // total)


def replicated_cost(cost: CostModel) -> CostModel:
    """Return the costs if every device stores all states, as in plain data parallelism."""
    profile = cost.profile if isinstance(cost, ProfileCost) else None
    layout = replace(cost.layout, sharded=False)
    return choose_cost(cost.cluster, cost.model, profile, layout=layout)


def _size_or_auto(word: str) -> int | str:
    return word if word == "auto" else int(word)
