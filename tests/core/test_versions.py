"""Versions of packages are looked up once a process."""

from importlib.metadata import version
from unittest import mock

from lightning_hetero.core.process import versions


def test_a_version_is_read_from_disk_once() -> None:
    versions.installed_version.cache_clear()
    with mock.patch.object(versions, "version", side_effect=version) as read:
        found = {versions.installed_version("numpy") for _ in range(3)}
    assert found == {version("numpy")}
    assert read.call_count == 1


def test_what_is_not_installed_has_the_version_that_is_asked_for() -> None:
    assert versions.installed_version("no-such-package") == "unknown"
    assert versions.installed_version("no-such-package", otherwise="none") == "none"
