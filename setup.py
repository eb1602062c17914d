"""Write the wheel's description: the README with the names of files where it links to them.

A link into the repository leads nowhere outside of it. Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

_LINK_TO_A_FILE = re.compile(r"!?\[([^\]]+)\]\((?!https?://)([^)]+)\)")
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def _named(link: "re.Match[str]") -> str:
    text, file = link.groups()
    return f"`{file}`" if file.endswith(text.strip("`")) else f"{text} (`{file}`)"


setup(
    long_description=_LINK_TO_A_FILE.sub(_named, README) + "\nFiles named here are the source's.\n",
    long_description_content_type="text/markdown",
)
