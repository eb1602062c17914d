"""`HeteroDataModule`: variable-length sequences, assigned in two stages, a plan for each iteration.

Every iteration draws samples up to a budget of tokens, assigns them under every candidate plan of
the strategy and runs the best (Hydraulis §4), planned in the background while earlier iterations
train. Under a strategy without plans (DDP, one device) each rank is a pipeline of its own.
"""

import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import override

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.data.assignment_store import open_store
from lightning_hetero.data.candidates import Candidates, assumed_costs
from lightning_hetero.data.lengths import cached_lengths
from lightning_hetero.data.loader import AssignedLoader, BatchMaker, SizedLoader
from lightning_hetero.data.order import EpochOrder, IterationSource
from lightning_hetero.data.planning import AheadOptions, AheadPlanner
from lightning_hetero.data.progress import Progress
from lightning_hetero.data.samples import OnOverlong, TokenSamples
from lightning_hetero.data.streaming import StreamOrder, is_stream
from lightning_hetero.data.tickets import TicketDealer
from lightning_hetero.models import PackedCollate

__all__ = ["HeteroDataModule"]
