"""The README says what the commands print."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def console_blocks() -> list[tuple[str, str]]:
    """Return (command, output) of each console block."""
    blocks = re.findall(r"```console\n\$ (.+?)\n(.*?)```", README, flags=re.DOTALL)
    return [(command, output) for command, output in blocks]


def as_words(text: str) -> list[str]:
    """Return the words, without the line that counts what the search has looked at."""
    lines = [line for line in text.splitlines() if not line.startswith("searched")]
    return " ".join(lines).split()


@pytest.mark.parametrize(("command", "output"), console_blocks())
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


def test_every_file_that_the_readme_names_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(README.splitlines()) <= 180
