"""The pages hold: what they print, show, link to and name; the site builds."""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from lightning_hetero.core.cluster import Cluster
from lightning_hetero.core.model_spec import ModelSpec
from tests.fast_python import fast_python

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text("utf-8")
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted(EXAMPLES.glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


def as_words(text: str) -> list[str]:
    """Return the words, without the line that counts what the search has looked at."""
    lines = [line for line in text.splitlines() if not line.startswith("searched")]
    return " ".join(lines).split()


@pytest.mark.parametrize(
    ("command", "output"), re.findall(r"```console\n\$ (.+?)\n(.*?)```", README, flags=re.DOTALL)
)
def test_a_command_prints_what_the_readme_shows(command: str, output: str) -> None:
    program, *arguments = shlex.split(command)
    assert program == "lightning-hetero"
    result = subprocess.run(
        [sys.executable, "-m", "lightning_hetero.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "COLUMNS": "100", "PYTHONPATH": str(ROOT)},
    )
    assert as_words(result.stdout) == as_words(output)


def test_measured_figures_have_commands_that_exist() -> None:
    lines = re.findall(r"^- .+$", README.split("## Measured")[1].split("\n## ")[0], re.MULTILINE)
    assert 1 <= len(lines) <= 5
    table = (EXAMPLES / "measured.md").read_text("utf-8")
    for line in lines:
        (command,) = re.findall(r"`(python [^`]+)`$", line)
        assert command in table, command
    words = re.findall(r"`python -m tests\.benchmarks(?: (\w+)|\.(\w+))", table)
    files = [path.stem for path in (ROOT / "tests/benchmarks").glob("*.py")]
    for word, module in words:
        found = [name for name in files if name == module or (word and f"bench_{word}" in name)]
        assert found, (word, module)


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(README.splitlines()) <= 150


def test_the_reference_of_files_is_what_the_dataclasses_say() -> None:
    made = subprocess.run(
        [sys.executable, "-c", "from file_reference import reference; print(reference(), end='')"],
        cwd=ROOT / "docs",
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    )
    text = (ROOT / "docs" / "files.md").read_text("utf-8")
    assert text == made.stdout, "run `make docs`"
    cluster, model = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert Cluster.from_yaml(cluster).num_ranks == 14
    assert ModelSpec._parse(model, is_json=False, name="").num_layers == 24


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere_and_named_files_exist(page: pathlib.Path) -> None:
    text = page.read_text("utf-8")
    for path in re.findall(r"examples/[\w./-]+\.(?:py|yaml|sh)", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, link


def test_the_wheels_description_names_files_instead_of_linking_to_them(tmp_path) -> None:
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    text = metadata.read_text("utf-8")
    assert "# lightning_hetero" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
    assert "more examples (`examples/README.md`)" in text


@pytest.mark.slow
def test_the_site_builds_without_a_warning() -> None:
    for name in ("sphinx", "furo", "myst_parser"):
        pytest.importorskip(name)
    # The sources of all modules take half of the time, and nothing in them can be wrong.
    extensions = "myst_parser,sphinx.ext.autodoc,sphinx.ext.napoleon"
    command = [fast_python(), "docs/make.py", "-D", f"extensions={extensions}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "docs" / "build" / "site"
    assert "HeteroStrategy" in (site / "reference" / "lightning_hetero.html").read_text("utf-8")
    assert (site / "docs" / "files.html").exists()
