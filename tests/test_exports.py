"""Every public name is exported once, and re-exported truthfully.

Packages and the modules that have a page of the reference list their names in `__all__`; in any
other module a name is private if it begins with an underscore.
"""

import ast
import importlib
import inspect
import pkgutil
from collections import defaultdict

import pytest

import lightning_hetero

PACKAGE = lightning_hetero.__name__
NAMES = [PACKAGE] + [
    item.name
    for item in pkgutil.walk_packages(lightning_hetero.__path__, PACKAGE + ".")
    if not item.name.endswith(".__main__")
]


@pytest.fixture(scope="module")
def modules():
    """Return all modules by name."""
    return {name: importlib.import_module(name) for name in NAMES}


def exports(module):
    """Return what a package or a page of the reference lists, or what any other module defines."""
    return list(getattr(module, "__all__", sorted(public(module))))


def public(module):
    """Return the public functions and classes that a module's text defines."""
    kinds = ast.FunctionDef | ast.ClassDef
    nodes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, kinds)]
    return {node.name for node in nodes if not node.name.startswith("_")}


def test_a_module_exports_what_it_defines_and_nothing_of_others(modules):
    wrong = []
    for name, module in modules.items():
        names, is_package = exports(module), hasattr(module, "__path__")
        if len(set(names)) < len(names) or not all(hasattr(module, item) for item in names):
            wrong.append(f"{name} exports twice, or what it hasn't")
        if not is_package and (left_out := public(module) - {*names}):
            wrong.append(f"{name} lacks {left_out}")
        for item in names:
            value = getattr(module, item, None)
            home = getattr(value, "__module__", name)
            is_defined = inspect.isclass(value) or inspect.isfunction(value)
            if is_defined and not is_package and home != name:
                wrong.append(f"{name} exports {item} of {home}")
            # Of a package, what one of its modules exports under this name.
            if is_defined and home.startswith(f"{PACKAGE}.") and home != name:
                is_same = getattr(modules[home], item, None) is value
                if not is_same or item not in exports(modules[home]):
                    wrong.append(f"{name} exports {item}, which {home} doesn't")
    assert not wrong


def test_no_name_has_two_meanings_within_a_package_or_among_what_packages_re_export(modules):
    scopes = defaultdict(dict)
    for name, module in modules.items():
        scope = PACKAGE if hasattr(module, "__path__") else name.rpartition(".")[0]
        for item in exports(module):
            value = getattr(module, item)
            if inspect.isclass(value) or inspect.isfunction(value):
                scopes[scope, item][id(value)] = name
    # Every subcommand's parser has the one name that the command line looks for.
    twice = {
        f"{scope}: {item}": sorted(found.values())
        for (scope, item), found in scopes.items()
        if len(found) > 1 and item != "add_arguments"
    }
    assert not twice
