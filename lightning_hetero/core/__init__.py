"""Plain data: plans, clusters, slices, transfers, schedules, errors. No torch in here.

Read in this order: `plan` (who runs what), `actions` (in which order), `slices` and `transfers`
(who keeps and fetches which weights), `cluster` and `devices` (what there is), `model_spec` and
`profile` (what it costs). Import names from these modules.
"""

import warnings
from importlib import import_module
from pkgutil import iter_modules
from typing import Any


def __getattr__(name: str) -> Any:
    for item in [] if name.startswith("_") else iter_modules(__path__):
        module = import_module(f"{__name__}.{item.name}")
        if name in module.__all__:
            text = f"Import {name} from {module.__name__}; {__name__} won't name it any longer."
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
