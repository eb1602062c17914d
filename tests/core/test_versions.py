"""Versions of packages are looked up once a process."""

from importlib.metadata import version
from unittest import mock

from lightning_hetero.core.process import identity


def test_a_version_is_read_from_disk_once() -> None:
    identity.installed_version.cache_clear()
    with mock.patch.object(identity, "version", side_effect=version) as read:
        found = {identity.installed_version("numpy") for _ in range(3)}
    assert found == {version("numpy")}
    assert read.call_count == 1


def test_what_is_not_installed_has_the_version_that_is_asked_for() -> None:
    assert identity.installed_version("no-such-package") == "unknown"
    assert identity.installed_version("no-such-package", otherwise="none") == "none"
