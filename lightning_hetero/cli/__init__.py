"""Parse the command line and run one subcommand: `lightning-hetero plan | simulate | ...`.

A subcommand is a module `lightning_hetero.cli.<name>` with `add_arguments(parser)` and
`run_<name>(arguments) -> int`. Only the one that was asked for is imported, so planning and
simulating never load torch.
"""

import argparse
import importlib
import os
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from lightning_hetero.core.errors import HeteroError
from lightning_hetero.core.process import installed_version
from lightning_hetero.core.texts import nearest

__all__ = ["main"]

_COMMANDS = {
    "plan": "plan pipelines, layers and micro-batches for a cluster",
    "simulate": "predict the iteration time of a plan and draw its timeline",
    "compare": "compare the predicted times and memory of two plans",
    "profile": "measure layer times and memory on this machine",
    "checkpoint": "list, inspect, verify, export, reject and prune checkpoints",
    "report": "write an HTML page about a run",
    "stragglers": "find out from a log what slowed a run or any other job",
    "explain": "the same as stragglers explain: find out from a trace why a run was slow",
}
_EXIT_BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code; a user's mistake is one line and code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:2] == ["stragglers", "explain"]:
        del words[0]
    parser = argparse.ArgumentParser(
        prog="lightning-hetero",
        description="Plan and simulate training on unequal GPUs, and inspect the files of runs.",
        epilog="The formats of files are described in docs/files.md of the sources.",
    )
    version = installed_version("lightning-hetero")
    parser.add_argument("--version", action="version", version=f"lightning-hetero {version}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = words[0] if words and words[0] in _COMMANDS else None
    run = None
    for name, summary in _COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name == chosen:
            module = importlib.import_module(f"{__name__}.{name}")
            module.add_arguments(subparser)
            run = getattr(module, f"run_{name}")
            _refuse_unknown_options(subparser, words[1:])
    parsed = parser.parse_args(words)
    assert run is not None, "argparse accepts only the chosen command here"
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]
            code = int(run(parsed))
        sys.stdout.flush()
        return code
    except HeteroError as error:
        message = " ".join(str(error).split())
        print(f"lightning-hetero {chosen}: error: {message}", file=sys.stderr)
        return _EXIT_BAD_INPUT
    except BrokenPipeError:
        # The reader has closed the pipe: the interpreter must not flush into it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


def _refuse_unknown_options(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Report a misspelled option; argparse itself would first ask for required ones."""
    if parser.format_usage().rstrip().endswith(" ..."):
        return  # Its options belong to the action that follows.
    known = set(re.findall(r"--[a-z-]+", parser.format_help()))
    for word in words:
        option = word.partition("=")[0]
        if option.startswith("--") and not any(name.startswith(option) for name in known):
            parser.error(f"There is no option {option}.{nearest(option, known)}")


def _show_warning(message: Warning | str, *_: Any) -> None:
    """Print a warning as one line, without its place in the code, which doesn't help users."""
    print(f"lightning-hetero: warning: {message}", file=sys.stderr)
