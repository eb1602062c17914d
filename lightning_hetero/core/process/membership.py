"""What names the run that a process is a member of, while ranks come and go."""

import os

__all__ = ["membership_name", "name_membership"]

_NAME = "LIGHTNING_HETERO_MEMBERSHIP"


def name_membership(name: str) -> None:
    """Name the run that this process, and those that it starts, are members of."""
    os.environ[_NAME] = name


def membership_name() -> str | None:
    """Return what `name_membership` said; None where nobody outlives the loss of a rank."""
    return os.environ.get(_NAME)
