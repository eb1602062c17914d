"""`lightning-hetero checkpoint`: list, inspect, verify, export, reject and prune checkpoints.

A PATH is a local folder or any URL that fsspec knows. Give several PATHs to inspect the folders of
all nodes, or copies, together.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace

from lightning_hetero.callbacks.checkpointing.places import free_memory
from lightning_hetero.checkpoint.inspection import (
    describe_layers,
    export_checkpoint,
    list_checkpoints,
    look,
    prune,
    reject,
    verify,
)
from lightning_hetero.checkpoint.store import check_store, local_folder, open_store
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.core.errors import CheckpointError, ConfigurationError

_EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `checkpoint list|inspect|verify|export|reject|prune`."""
    parser.description = (
        "List, inspect, verify, export, reject and prune checkpoints. A PATH is a local folder or "
        "any URL that fsspec knows. A checkpoint may be spread over the folders of several nodes: "
        "give all of them."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("list", "print one line for each checkpoint, the newest first"),
        ("inspect", "print how much of each layer is in which folder"),
        ("verify", "read all files and compare their checksums"),
        ("export", "write one file that plain Lightning reads"),
    ):
        sentence = f"{summary[0].upper()}{summary[1:]}."
        command = actions.add_parser(name, help=summary, description=sentence)
        command.add_argument("paths", nargs="+", metavar="PATH", help="a folder or URL")
        if name != "list":
            command.add_argument(
                "--step", type=int, help="step of the checkpoint (default: the newest complete one)"
            )
        if name == "export":
            command.add_argument(
                "--output", required=True, metavar="FILE", help="file to write, such as m.ckpt"
            )
    rejecting = actions.add_parser(
        "reject",
        help="mark a checkpoint as bad, so that no run resumes from it",
        description="Mark the checkpoint of a step as bad, so that no run resumes from it: the "
        "next start takes an older one. Give the folders of all nodes.",
    )
    rejecting.add_argument("step", type=int, metavar="STEP", help="step of the checkpoint")
    rejecting.add_argument("paths", nargs="+", metavar="PATH", help="a folder or URL")
    pruning = actions.add_parser(
        "prune",
        help="delete old checkpoints",
        description="Delete all but the newest complete checkpoints in a folder (--keep); or what "
        "runs of yours that have ended left in this machine's shared memory (--memory).",
    )
    pruning.add_argument(
        "paths", nargs="*", metavar="PATH", help="a folder or URL that has the parts of all ranks"
    )
    pruning.add_argument(
        "--keep", type=int, metavar="NUMBER", help="checkpoints to keep, 1 or more"
    )
    pruning.add_argument(
        "--memory",
        type=float,
        metavar="HOURS",
        help="free the shared memory of runs that have written nothing for this many hours",
    )


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Run one action; 0, or 1 if `verify` finds damage."""
    if arguments.action == "prune":
        given = len(arguments.paths), arguments.keep is None, arguments.memory is None
        if given not in ((1, False, True), (0, True, False)):
            raise ConfigurationError("prune takes one PATH and --keep, or --memory HOURS.")
        if arguments.memory is not None:
            for folder in free_memory(3600.0 * arguments.memory):
                print(f"freed {folder}")
            return 0
    tiers = [
        Tier(kind=TierKind.REMOTE, store=open_store(path), name=path) for path in arguments.paths
    ]
    problems = {tier.name: _problem(tier) for tier in tiers}
    readable = [tier for tier in tiers if problems[tier.name] is None]
    if arguments.action == "list" and readable:
        print(list_checkpoints(readable))
    if len(readable) < len(tiers):
        # A place that is missing or can't be read isn't the same as an empty one.
        raise CheckpointError(" ".join(text for text in problems.values() if text is not None))
    try:
        return _act(arguments, tiers)
    except OSError as error:
        raise CheckpointError(f"Can't {arguments.action}: {error}.") from error


def _act(arguments: argparse.Namespace, tiers: Sequence[Tier]) -> int:
    if arguments.action == "verify":
        return _verify(tiers, arguments.step)
    if arguments.action == "inspect":
        print(describe_layers(look(tiers, step=arguments.step)))
    elif arguments.action == "reject":
        for text in reject(tiers, arguments.step):
            print(f"rejected {text}")
    elif arguments.action == "prune":
        for item in prune(replace(tiers[0], keep=arguments.keep)):
            print(f"deleted {item}")
    elif arguments.action == "export":
        recovered = export_checkpoint(tiers, arguments.output, step=arguments.step)
        print(f"wrote {recovered.id} to {arguments.output}: {len(recovered.slices)} parameters")
    return 0


def _verify(tiers: Sequence[Tier], step: int | None) -> int:
    view = look(tiers, step=step)
    damage = verify(view, tiers)
    for line in damage:
        print(line)
    total = sum(manifest.size_bytes for manifest in view.manifests.values())
    verdict = f"{len(damage)} files damaged or missing" if damage else "all intact"
    print(f"{view.id}: {len(view.manifests)} parts, {total / 1e6:.2f} MB, {verdict}")
    return _EXIT_DAMAGED if damage else 0


def _problem(tier: Tier) -> str | None:
    path = tier.name
    folder = local_folder(path)
    if folder is not None and not folder.exists():
        return f"Can't read {path}: there is no such folder."
    try:
        check_store(path, writes=False)
        tier.store.list()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        # Stores raise their client library's own types.
        return f"Can't read {path}: {error}."
    return None
