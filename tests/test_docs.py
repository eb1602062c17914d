"""The pages hold: links lead somewhere, the reference of files is true, the site builds."""

import pathlib
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import pytest

from lightning_hetero.core.cluster import Cluster, Link, Node
from lightning_hetero.core.devices import DeviceSpec
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import PipelinePlan, StagePlan
from lightning_hetero.core.profile import BlockTimes, DeviceProfile, Profile
from tests.fast_python import fast_python

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]


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
    assert (ROOT / "docs" / "files.md").read_text("utf-8") == made.stdout, "run `make docs`"


@pytest.mark.parametrize(
    "schema",
    [
        Cluster,
        Node,
        Link,
        DeviceSpec,
        ModelSpec,
        PipelinePlan,
        StagePlan,
        Profile,
        DeviceProfile,
        BlockTimes,
    ],
)
def test_every_field_of_a_file_is_explained(schema: type) -> None:
    text = (ROOT / "docs" / "files.md").read_text("utf-8")
    section = text.split(f"### {schema.__name__}\n")[1].split("\n#")[0]
    for item in fields(schema):
        (row,) = [line for line in section.splitlines() if line.startswith(f"| `{item.name}` |")]
        assert len(row.split(" | ")[-1].strip(" |")) > 10


def test_the_cluster_of_the_reference_is_one() -> None:
    text = (ROOT / "docs" / "files.md").read_text("utf-8")
    cluster, model = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert Cluster.from_yaml(cluster).num_ranks == 14
    assert ModelSpec._parse(model, is_json=False, name="").num_layers == 24


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}
            assert anchor in slugs, link


def test_the_wheels_description_names_files_instead_of_linking_to_them(
    tmp_path: pathlib.Path,
) -> None:
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools import build_meta as b; b.prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    text = metadata.read_text("utf-8")
    assert "# lightning_hetero" in text
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
    assert "more examples (`examples/README.md`), how it works (`examples/how" in text
    assert "1. `lightning_hetero/core/plan.py`: what a plan is." in text


@pytest.mark.slow
def test_the_site_builds_without_a_warning() -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_parser")
    # The sources of all modules take half of the time, and nothing in them can be wrong.
    extensions = "myst_parser,sphinx.ext.autodoc,sphinx.ext.napoleon"
    command = [fast_python(), "docs/make.py", "-D", f"extensions={extensions}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "docs" / "build" / "site"
    assert "HeteroStrategy" in (site / "reference" / "lightning_hetero.html").read_text("utf-8")
    assert (site / "docs" / "files.html").exists()
