"""The adapter to Lightning: `HeteroStrategy`, and what its hooks need. No algorithm lives here.

Lightning's public hooks don't suffice: the private names that are used, here and in other packages,
are listed in `docs/private-names.md` with why.
"""

from lightning_hetero.strategy.engine_options import register_layers
from lightning_hetero.strategy.hetero import HeteroStrategy

__all__ = ["HeteroStrategy"]

register_layers()
