"""Versions of packages are looked up once a process."""

from importlib.metadata import distribution, version
from unittest import mock

import pytest

from lightning_hetero.core.process import identity


def test_a_version_is_read_from_disk_once() -> None:
    identity.installed_version.cache_clear()
    with mock.patch.object(identity, "distribution", side_effect=distribution) as read:
        found = {identity.installed_version("numpy") for _ in range(3)}
    assert found == {version("numpy")}
    assert read.call_count == 1


@pytest.mark.parametrize("package", ["torch", "lightning", "pytest"])
def test_a_version_is_what_python_itself_finds(package: str) -> None:
    assert identity.installed_version(package) == version(package)


@pytest.mark.parametrize(
    "text", ["Name: x\n\nVersion: 7 is told of in what follows", "", None, "Name: x\nVersion:"]
)
def test_a_version_that_stands_in_no_line_of_its_own_is_left_to_python(text: str | None) -> None:
    found = mock.Mock(read_text=lambda _: text, version="1.2")
    with mock.patch.object(identity, "distribution", return_value=found):
        assert identity.installed_version.__wrapped__("x") == "1.2"


def test_what_is_not_installed_has_the_version_that_is_asked_for() -> None:
    assert identity.installed_version("no-such-package") == "unknown"
    assert identity.installed_version("no-such-package", otherwise="none") == "none"
