"""Be the main program that `python` would be, in a process that has run something else before."""

import atexit
import os
import runpy
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path


def run(arguments: Sequence[str]) -> None:
    """Run a script, `-m` and a module, or `-c` and code, with its arguments."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    if arguments[0] == "-m":
        sys.argv = [*arguments[1:]]
        sys.path.insert(0, os.getcwd())
        sys.modules.pop(arguments[1], None)  # Where it was imported already it would be told of.
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, "")
        exec(compile(arguments[1], "<string>", "exec"), sys.modules["__main__"].__dict__)
    else:
        sys.argv = [*arguments]
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def run_and_exit(arguments: Sequence[str]) -> None:
    """Run it and end the process as an interpreter does, but for freeing what the end frees."""
    code = 1
    try:
        run(arguments)
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and not isinstance(leaving.code, int):
            sys.stderr.write(f"{leaving.code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
