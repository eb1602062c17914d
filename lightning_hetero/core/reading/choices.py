"""Options whose values are one of a few words."""

import re
from enum import StrEnum

from lightning_hetero.core.errors import ConfigurationError

__all__ = ["Choice"]

_INNER_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


class Choice(StrEnum):
    """Base of options that are one of a few words; the error for another word lists these.

    ::

        class OnFull(Choice):
            WAIT = "wait"

        OnFull("go")  # on_full is 'go'; it must be one of 'wait'.
    """

    @classmethod
    def _missing_(cls, value: object) -> None:
        name = _INNER_CAPITAL.sub("_", cls.__name__).lower()
        words = ", ".join(repr(str(choice)) for choice in cls)
        raise ConfigurationError(f"{name} is {value!r}; it must be one of {words}.")
