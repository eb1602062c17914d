"""Which version of a package is installed."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


@cache
def installed_version(package: str, *, otherwise: str = "unknown") -> str:
    """Return a package's version, or `otherwise` where it isn't installed.

    Looked up once a process: to read a package's metadata takes up to 10 ms, which each rank would
    hold its interpreter up for in every checkpoint.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
