"""Every private name of another package that is used is listed with why, and exists."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

from lightning_hetero.private_names import PRIVATE_NAMES

PACKAGE = Path(__file__).parents[1] / "lightning_hetero"
OTHERS = ("torch", "lightning", "torchmetrics", "transformers")
PYTHONS_OWN = {"_asdict", "_exit", "_fields", "_getframe"}


def own_names(trees: list[ast.Module]) -> set[str]:
    """Return the names that the package itself defines or sets on `self`."""
    found = set(PYTHONS_OWN)
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
            case ast.AnnAssign(target=ast.Attribute()):
                found.add(node.target.attr)
            case ast.Attribute(ctx=ast.Store(), value=ast.Name(id="self")):
                found.add(node.attr)
            case ast.Constant(value=str()):
                found.add(node.value)
    return found


def used_names() -> dict[str, str]:
    """Return private names of others, by name, with a file that uses each."""
    trees = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    own, found = own_names(list(trees.values())), {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Attribute) and node.attr not in own:
                names = [node.attr]
            elif isinstance(node, ast.ImportFrom) and node.module:
                parts = node.module.split(".")
                if parts[0] in OTHERS:
                    private = [part for part in parts if part.startswith("_")]
                    names = private[:1] or [alias.name for alias in node.names]
            for name in names:
                if name.startswith("_") and not name.startswith("__"):
                    found[name] = str(path.relative_to(PACKAGE))
    return found


def test_each_private_name_that_is_used_is_listed() -> None:
    listed = {item.name for item in PRIVATE_NAMES}
    lacking = {name: path for name, path in used_names().items() if name not in listed}
    assert not lacking, (
        f"say in lightning_hetero/private_names.py where these are from, and why: {lacking}"
    )


def test_a_name_that_nobody_uses_is_not_listed() -> None:
    text = "\n".join(
        path.read_text("utf-8") for path in PACKAGE.rglob("*.py") if path.name != "private_names.py"
    )
    assert [item.name for item in PRIVATE_NAMES if item.name not in text] == []


@pytest.mark.parametrize("item", PRIVATE_NAMES, ids=lambda item: f"{item.home}.{item.name}")
@pytest.mark.filterwarnings("ignore")
def test_each_exists_where_it_is_said_to_be(item) -> None:
    module, _, inside = item.home.partition(":")
    home = import_module(module)
    if inside:
        home = getattr(home, inside)
    if hasattr(home, item.name):
        return
    sources = home.__mro__[:-1] if inspect.isclass(home) else [home]
    texts = [inspect.getsource(source) for source in sources]
    assert any(item.name in text for text in texts), f"{item.home} has no {item.name}: {item.why}"
