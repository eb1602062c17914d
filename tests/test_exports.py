"""Every public name is documented, exported by its module once, and re-exported truthfully."""

import ast
import functools
import importlib
import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import lightning_hetero

PACKAGE = lightning_hetero.__name__
NAMES = [PACKAGE] + [
    item.name
    for item in pkgutil.walk_packages(lightning_hetero.__path__, PACKAGE + ".")
    if not item.name.endswith(".__main__")
]


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def is_package(module: ModuleType) -> bool:
    return hasattr(module, "__path__")


def exports(module: ModuleType) -> list[str]:
    return list(getattr(module, "__all__", ()))


@dataclass(frozen=True)
class Definition:
    """A public name that a module's text defines."""

    is_constant: bool
    is_documented: bool


@functools.cache
def top_level(module: ModuleType) -> dict[str, Definition]:
    """Return the public functions, classes and constants of a module; a type alias is neither."""
    body = ast.parse(inspect.getsource(module)).body
    found: dict[str, Definition] = {}
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = Definition(False, ast.get_docstring(node) is not None)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found |= {name: Definition(True, text) for name in names if name.isupper()}
    return {name: said for name, said in found.items() if not name.startswith("_")}


def hold_in_all(law: Callable[[str], None]) -> None:
    """Say of every module of the package in which a law fails how it does."""
    broken = []
    for name in NAMES:
        try:
            law(name)
        except AssertionError as error:
            broken.append(str(error).partition("\n")[0])
    assert not broken, "\n".join(broken)


def test_every_module_says_what_it_is_for_and_what_it_exports():
    def law(name: str) -> None:
        module = load(name)
        assert (module.__doc__ or "").strip(), f"{name} has no docstring"
        assert "__all__" in vars(module) or not top_level(module), f"{name} has no __all__"
        names = exports(module)
        assert len(set(names)) == len(names), f"{name}.__all__ repeats a name"
        missing = [item for item in names if not hasattr(module, item)]
        assert not missing, f"{name}.__all__ names what doesn't exist: {missing}"

    hold_in_all(law)


def test_a_module_exports_every_public_function_and_class_and_nothing_of_others():
    def law(name: str) -> None:
        module = load(name)
        if is_package(module):
            return
        public = {item for item, what in top_level(module).items() if not what.is_constant}
        left_out = public - set(exports(module))
        assert not left_out, f"{name}.__all__ lacks {left_out}"
        for item in exports(module):
            value = getattr(module, item)
            if inspect.isclass(value) or inspect.isfunction(value):
                home = value.__module__
                assert home == name, f"{name} exports {item} of {home}"

    hold_in_all(law)


def undocumented_methods(kind: type) -> list[str]:
    """Return the public methods and properties of a class that say nothing and override nothing."""
    bare = []
    for member, value in vars(kind).items():
        function = getattr(value, "__func__", getattr(value, "fget", value))
        inherited = any(hasattr(base, member) for base in kind.__mro__[1:])
        if not (member.startswith("_") or inherited) and inspect.isfunction(function):
            bare += [] if function.__doc__ else [member]
    return bare


def test_every_public_name_and_method_is_documented():
    def law(name: str) -> None:
        module = load(name)
        said = top_level(module)
        bare = [item for item in exports(module) if item in said and not said[item].is_documented]
        for item in exports(module):
            value = getattr(module, item)
            if inspect.isclass(value) and value.__module__ == name:
                bare += [f"{item}.{member}" for member in undocumented_methods(value)]
        assert not bare, f"{name} has public names without a docstring: {bare}"

    hold_in_all(law)


def test_a_package_re_exports_only_what_one_of_its_modules_exports():
    def law(name: str) -> None:
        package = load(name)
        if not is_package(package):
            return
        homes: dict[str, list[str]] = defaultdict(list)
        for other in NAMES:
            if other.startswith(name + ".") and not is_package(load(other)):
                for item in exports(load(other)):
                    homes[item].append(other)
        own = top_level(package)
        for item in exports(package):
            if item in own:
                continue
            assert homes[item], f"{name} exports {item}, which no module of it exports"
            values = [getattr(load(home), item) for home in homes[item]]
            is_one = any(value is getattr(package, item) for value in values)
            assert is_one, f"{name} exports another {item} than its modules"

    hold_in_all(law)


def test_no_name_has_two_meanings_within_a_package_or_among_what_packages_re_export():
    scopes: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for name in NAMES:
        module = load(name)
        scope = PACKAGE if is_package(module) else name.rpartition(".")[0]
        for item in exports(module):
            value = getattr(module, item)
            if inspect.isclass(value) or inspect.isfunction(value):
                scopes[scope, item][id(value)] = name
    twice = {
        f"{scope}: {item}": sorted(found.values())
        for (scope, item), found in scopes.items()
        # Every subcommand's parser has the one name that the command line looks for.
        if len(found) > 1 and item != "add_arguments"
    }
    assert not twice, f"names with two meanings: {twice}"


def test_the_top_level_exports_what_a_script_needs():
    assert {"HeteroStrategy", "ParallelPlan"} <= set(exports(lightning_hetero))
