"""`lightning-hetero checkpoint`: look at checkpoints, check them, convert them, delete old ones.

A PATH is a local folder or any URL that fsspec knows. Give several PATHs to look at the folders of
all nodes, or at copies, together.
"""

import argparse
from collections.abc import Sequence

from lightning_hetero.checkpoint.inspection import (
    describe_sources,
    export_checkpoint,
    format_bitmap,
    list_checkpoints,
    look,
    verify,
)
from lightning_hetero.checkpoint.pruning import prune
from lightning_hetero.checkpoint.retry import open_store
from lightning_hetero.checkpoint.tiers import Tier, TierKind
from lightning_hetero.core.errors import CheckpointError, ConfigurationError

__all__ = ["add_arguments", "run_checkpoint"]

_EXIT_DAMAGED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `checkpoint list|inspect|verify|export|prune`."""
    parser.description = (
        "Look at checkpoints, check them, convert them, delete old ones. A PATH is a local folder "
        "or any URL that fsspec knows. Give several PATHs to look at the folders of all nodes, or "
        "at copies, together."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("list", "one line for each checkpoint, the newest first"),
        ("inspect", "layers × places, and where each layer would be recovered from"),
        ("verify", "read everything and compare the checksums"),
    ):
        command = actions.add_parser(name, help=summary, description=summary)
        command.add_argument("paths", nargs="+", metavar="PATH")
        if name != "list":
            command.add_argument("--step", type=int, help="this step; else the newest complete one")
    export = actions.add_parser("export", help="write one file that plain Lightning reads")
    export.add_argument("paths", nargs="+", metavar="PATH")
    export.add_argument("--output", required=True, metavar="FILE", help="such as model.ckpt")
    export.add_argument("--step", type=int, help="this step; else the newest complete one")
    pruning = actions.add_parser("prune", help="delete all but the newest complete checkpoints")
    pruning.add_argument("paths", nargs=1, metavar="PATH", help="a place that holds all parts")
    pruning.add_argument("--keep", type=int, required=True, help="how many to keep, 1 or more")


def run_checkpoint(arguments: argparse.Namespace) -> int:
    """Run one action; 0, or 1 if `verify` finds damage."""
    tiers = [
        Tier(kind=TierKind.REMOTE, store=open_store(path), name=path) for path in arguments.paths
    ]
    if arguments.action == "list":
        print(list_checkpoints(tiers))
    elif arguments.action == "inspect":
        _inspect(tiers, arguments.step)
    elif arguments.action == "verify":
        return _verify(tiers, arguments.step)
    elif arguments.action == "export":
        recovered = export_checkpoint(tiers, arguments.output, step=arguments.step)
        print(f"wrote {recovered.id} to {arguments.output}: {len(recovered.slices)} parameters")
    else:
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


def _prune(tier: Tier, keep: int) -> None:
    if keep < 1:
        raise ConfigurationError(f"--keep is {keep}; it must be 1 or more.")
    try:
        gone = prune(tier.store, keep=keep, shared=True)
    except OSError as error:
        raise CheckpointError(f"Can't prune {tier.store}: {error}.") from error
    print(f"deleted {len(gone)} checkpoints" + "".join(f"\n  {item}" for item in gone))
