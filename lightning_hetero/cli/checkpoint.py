"""`lightning-hetero checkpoint`: list, inspect, verify, export, reject and prune checkpoints.

A PATH is a local folder or any URL that fsspec knows. Give several PATHs to look at the folders of
all nodes, or at copies, together.
"""

import argparse
import shutil
import time
from collections.abc import Iterable, Sequence

from lightning_hetero.checkpoint.inspection import (
    describe_sources,
    export_checkpoint,
    format_bitmap,
    list_checkpoints,
    look,
    reject,
    verify,
)
from lightning_hetero.checkpoint.places.parts import prune
from lightning_hetero.checkpoint.places.retry import (
    RetryPolicy,
    local_folder,
    look_at_store,
    open_store,
)
from lightning_hetero.checkpoint.places.shared_memory import memory_places
from lightning_hetero.checkpoint.places.tiers import Tier, TierKind
from lightning_hetero.core.errors import CheckpointError, ConfigurationError

__all__ = ["add_arguments", "run_checkpoint"]

_EXIT_DAMAGED = 1
_RETRY = RetryPolicy(attempts=2)
"""Few tries: a person waits for the answer, and can ask again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `checkpoint list|inspect|verify|export|reject|prune`."""
    parser.description = (
        "Look at checkpoints, check them, convert them, delete old ones. A PATH is a local folder "
        "or any URL that fsspec knows. Give several PATHs to look at the folders of all nodes, or "
        "at copies, together."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("list", "print one line for each checkpoint, the newest first"),
        ("inspect", "print which layers are where, and where each would be recovered from"),
        ("verify", "read everything and compare the checksums"),
        ("export", "write one file that plain Lightning reads"),
    ):
        sentence = f"{summary[0].upper()}{summary[1:]}."
        command = actions.add_parser(name, help=summary, description=sentence)
        command.add_argument("paths", nargs="+", metavar="PATH", help="a folder or URL")
        if name != "list":
            command.add_argument("--step", type=int, help="this step; else the newest complete one")
        if name == "export":
            command.add_argument("--output", required=True, metavar="FILE", help="such as m.ckpt")
    rejecting = actions.add_parser(
        "reject",
        help="leave one out from now on",
        description="Mark a step's checkpoints in the given places, so that no run goes on from "
        "them: the next start takes an older one. Give the folders of all nodes.",
    )
    rejecting.add_argument("step", type=int, metavar="STEP", help="the step")
    rejecting.add_argument("paths", nargs="+", metavar="PATH", help="a folder or URL")
    pruning = actions.add_parser(
        "prune",
        help="delete old checkpoints",
        description="Delete all but the newest complete checkpoints of a place; or, with --memory, "
        "what failed runs have left in this machine's shared memory.",
    )
    pruning.add_argument("paths", nargs="*", metavar="PATH", help="a place with all ranks' parts")
    pruning.add_argument("--keep", type=int, help="how many to keep there, 1 or more")
    pruning.add_argument(
        "--memory", action="store_true", help="this user's checkpoints in shared memory instead"
    )
    pruning.add_argument(
        "--older-than",
        type=float,
        default=24.0,
        metavar="HOURS",
        help="with --memory: only runs that have saved nothing for so many hours (default: 24)",
    )


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Run one action; 0, or 1 if `verify` finds damage."""
    if arguments.action == "prune":
        _check_prune(arguments)
        if arguments.memory:
            _prune_memory(arguments.older_than)
            return 0
    tiers = [
        Tier(kind=TierKind.REMOTE, store=open_store(path, retry=_RETRY), name=path)
        for path in arguments.paths
    ]
    if arguments.action == "list":
        _list(tiers, arguments.paths)
        return 0
    for path in arguments.paths:
        look_at_store(path)
    if arguments.action == "reject":
        for text in reject(tiers, arguments.step):
            print(f"rejected {text}")
        return 0
    if arguments.action == "inspect":
        _inspect(tiers, arguments.step)
    elif arguments.action == "verify":
        return _verify(tiers, arguments.step)
    elif arguments.action == "export":
        recovered = export_checkpoint(tiers, arguments.output, step=arguments.step)
        print(f"wrote {recovered.id} to {arguments.output}: {len(recovered.slices)} parameters")
    else:
        _refuse([_problem(tiers[0], arguments.paths[0])])
        _prune(tiers[0], arguments.keep)
    return 0


def _inspect(tiers: Sequence[Tier], step: int | None) -> None:
    view = look(tiers, step=step)
    print(f"{view.id}, saved by {view.world_size} ranks\n")
    print(format_bitmap(view.inventory, view.manifests, view.id))
    print("\n# all of the layer, + some of it, . nothing\n")
    print(describe_sources(view))


def _verify(tiers: Sequence[Tier], step: int | None) -> int:
    view = look(tiers, step=step)
    damage = verify(view, tiers)
    for line in damage:
        print(line)
    total = sum(manifest.size_bytes for manifest in view.manifests.values())
    verdict = f"{len(damage)} files damaged or missing" if damage else "all intact"
    print(f"{view.id}: {len(view.manifests)} parts, {total / 1e6:.2f} MB, {verdict}")
    return _EXIT_DAMAGED if damage else 0


def _list(tiers: Sequence[Tier], paths: Sequence[str]) -> None:
    """Print the checkpoints of all places that can be read.

    Raises:
        CheckpointError: A place is missing or can't be read, which isn't the same as empty.
    """
    problems = {path: _problem(tier, path) for tier, path in zip(tiers, paths, strict=True)}
    readable = [tier for tier in tiers if problems[tier.name] is None]
    if readable:
        print(list_checkpoints(readable))
    _refuse(problems.values())


def _refuse(problems: Iterable[str | None]) -> None:
    if closed := [why for why in problems if why is not None]:
        raise CheckpointError(" ".join(closed))


def _problem(tier: Tier, path: str) -> str | None:
    folder = local_folder(path)
    if folder is not None and not folder.exists():
        return f"Can't read {path}: there is no such folder."
    try:
        look_at_store(path)
        tier.store.list()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        # Stores raise their client library's own types.
        return f"Can't read {path}: {error}."
    return None


def _check_prune(arguments: argparse.Namespace) -> None:
    if arguments.memory:
        if arguments.paths or arguments.keep is not None:
            raise ConfigurationError("--memory takes neither PATH nor --keep; give it alone.")
        if not arguments.older_than >= 0:
            raise ConfigurationError(f"--older-than is {arguments.older_than}; give 0 or more.")
    elif len(arguments.paths) != 1 or arguments.keep is None:
        raise ConfigurationError("prune takes one PATH and --keep, or --memory.")
    elif arguments.keep < 1:
        raise ConfigurationError(f"--keep is {arguments.keep}; it must be 1 or more.")


def _prune_memory(older_than_hours: float) -> None:
    """Delete the shared memory of runs that are over, and print what stays."""
    freed = 0
    now = time.time()
    for place in memory_places():
        age_hours = max(0.0, now - place.last_write_s) / 3600
        text = (
            f"{place.folder} ({place.num_bytes / 1e6:.1f} MB, last written {age_hours:.1f} h ago)"
        )
        if age_hours < older_than_hours:
            print(f"kept     {text}")
            continue
        try:
            shutil.rmtree(place.folder)
        except OSError as error:
            raise CheckpointError(f"Can't delete {place.folder}: {error}.") from error
        freed += place.num_bytes
        print(f"deleted  {text}")
    print(f"freed {freed / 1e6:.1f} MB of shared memory")


def _prune(tier: Tier, keep: int) -> None:
    try:
        gone = prune(tier, keep=keep)
    except OSError as error:
        raise CheckpointError(f"Can't prune {tier.store}: {error}.") from error
    print(f"deleted {len(gone)} checkpoints" + "".join(f"\n  {item}" for item in gone))
