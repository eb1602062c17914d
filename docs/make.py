"""Build the site: `make docs`, or `python docs/make.py`. Needs the `docs` extra, and no network.

What follows the command are options for Sphinx.

The pages are those that the repository shows: README, examples, changelog, and `docs/*.md`. Their
links stay as they are: pages link to pages, and a link to another file becomes a download of it.
A link to something that isn't there is an error, as is every other warning.
"""

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

from file_reference import reference

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "docs" / "build" / "source"
SITE = ROOT / "docs" / "build" / "site"
PACKAGES = {
    "lightning_hetero": "What most users need",
    "lightning_hetero.callbacks": "Callbacks",
    "lightning_hetero.data": "Data",
    "lightning_hetero.models": "Models",
    "lightning_hetero.checkpoint": "Checkpoints",
    "lightning_hetero.straggler": "Stragglers",
    "lightning_hetero.core.plan": "Plans",
    "lightning_hetero.core.cluster": "Clusters",
    "lightning_hetero.core.devices": "Devices",
    "lightning_hetero.core.model_spec": "Sizes of models",
    "lightning_hetero.core.profile": "Profiles",
    "lightning_hetero.core.errors": "Errors",
    "lightning_hetero.planner": "The planner",
    "lightning_hetero.simulator": "The simulator",
    "lightning_hetero.assign": "Assignment of samples",
    "lightning_hetero.testing": "Drills",
}
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_INDEX = """# lightning_hetero

```{toctree}
:maxdepth: 1

README
examples/README
examples/how-it-works
examples/migrating
docs/contract
docs/supported
docs/tensor-parallel
docs/quantized
docs/slow-runs
docs/files
docs/private-names
examples/measured
CHANGELOG
```

```{toctree}
:maxdepth: 1
:caption: Reference

%s
```
"""


def main() -> int:
    """Write the sources of the site, then the site; the exit code is Sphinx's."""
    shutil.rmtree(ROOT / "docs" / "build", ignore_errors=True)
    (ROOT / "docs" / "files.md").write_text(reference(), encoding="utf-8")
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "examples").glob("*.md")]
    for page in [*pages, *(ROOT / "docs").glob("*.md")]:
        stage(page)
    for name, title in PACKAGES.items():
        write_reference(name, title)
    index = _INDEX % "\n".join(f"reference/{name}" for name in PACKAGES)
    (SOURCE / "index.md").write_text(index, encoding="utf-8")
    shutil.copy(ROOT / "docs" / "conf.py", SOURCE)
    # Not in parallel: each worker imports everything anew, which takes longer than the pages.
    options = ["-W", "--keep-going", "-q", *sys.argv[1:]]
    return subprocess.call([sys.executable, "-m", "sphinx", *options, str(SOURCE), str(SITE)])


def stage(page: Path) -> None:
    """Copy a page, and what it links to, to the same place in the site's sources.

    A link to a folder of the package becomes one to the reference of that package.
    """
    up = "../" * len(page.parent.relative_to(ROOT).parts)

    def resolve(match: re.Match[str]) -> str:
        link = match[1]
        target = (page.parent / link).resolve()
        if "://" in link or target.suffix == ".md" or not target.exists():
            return match[0]
        if target.is_file():
            copy(target)
            return match[0]
        name = ".".join(target.relative_to(ROOT).parts)
        return f"]({up}reference/{name}.md)"

    text = _LINK.sub(resolve, page.read_text(encoding="utf-8"))
    place = SOURCE / page.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text, encoding="utf-8")


def copy(file: Path) -> None:
    """Copy a file of the repository to the same place in the site's sources."""
    place = SOURCE / file.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, place)


def write_reference(name: str, title: str) -> None:
    """Write the page of a module's public names; those of the package itself are on its page."""
    first = next(iter(PACKAGES))
    known = [] if name == first else importlib.import_module(first).__all__
    elsewhere = [item for item in importlib.import_module(name).__all__ if item in known]
    page = SOURCE / "reference" / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    text = f"# {title}: `{name}`\n\n"
    if elsewhere:
        names = ", ".join(f"`{item}`" for item in elsewhere)
        text += f"{names}: see [{PACKAGES[first].lower()}]({first}.md).\n\n"
    excluded = f"   :exclude-members: {', '.join(elsewhere)}\n" if elsewhere else ""
    text += f"```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n{excluded}```\n"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
