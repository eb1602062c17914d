"""Write the wheel's description: the README without links that lead nowhere outside of it.

Everything else is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

_LINK_TO_A_FILE = re.compile(r"\[([^\]]+)\]\((?!https?://)[^)]+\)")
README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")

setup(
    long_description=_LINK_TO_A_FILE.sub(r"\1", README),
    long_description_content_type="text/markdown",
)
