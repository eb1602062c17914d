"""Every private name of another package that is used is listed with why, and exists."""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHERS = ("torch", "lightning", "torchmetrics", "transformers")
PYTHONS_OWN = {"_asdict", "_exit", "_fields", "_getframe"}
TEXTS = {path: path.read_text("utf-8") for path in (ROOT / "lightning_hetero").rglob("*.py")}
LISTED = [
    (home, name)
    for line in (ROOT / "docs/private-names.md").read_text("utf-8").splitlines()
    if line.startswith("| `")
    for home, *names in [re.findall(r"`([\w.:]+)`", line.rsplit(" | ", 1)[0])]
    for name in names
]


def private_names():
    """Yield names of others that may be private, each with a file that uses it."""
    own, used = set(PYTHONS_OWN), []
    for path, text in TEXTS.items():
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    own.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    own.add(name)
                case ast.AnnAssign(target=ast.Attribute(attr=name)):
                    own.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store(), value=ast.Name(id="self")):
                    own.add(name)
                case ast.Constant(value=str(name)):
                    own.add(name)
                case ast.Attribute(attr=name):
                    used.append((name, path))
                case ast.ImportFrom(module=str(home)) if home.split(".")[0] in OTHERS:
                    private = [part for part in home.split(".") if part.startswith("_")]
                    names = private[:1] or [alias.name for alias in node.names]
                    used += [(name, path) for name in names]
    return {n: path for n, path in used if n[0] == "_" and n[:2] != "__" and n not in own}


def test_each_private_name_that_is_used_is_listed_and_no_other() -> None:
    listed = {name for _, name in LISTED}
    lacking = {name: path for name, path in private_names().items() if name not in listed}
    assert not lacking, f"say in docs/private-names.md where these are from, and why: {lacking}"
    used = {name for text in TEXTS.values() for name in re.findall(r"\b_\w+", text)}
    assert listed <= used


@pytest.mark.parametrize(("home", "name"), LISTED)
@pytest.mark.filterwarnings("ignore")
def test_each_exists_where_it_is_said_to_be(home: str, name: str) -> None:
    module, _, inside = home.partition(":")
    place = import_module(module)
    if inside:
        place = getattr(place, inside)
    sources = place.__mro__[:-1] if inspect.isclass(place) else [place]
    is_there = hasattr(place, name) or any(name in inspect.getsource(item) for item in sources)
    assert is_there, f"{home} has no {name}"
