"""Runs of one case under several ways of exchanging weights and gradients."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

from lightning_hetero.runtime.exchange.routes import Routes
from tests.runtime.runs import Case, Outcome, train


@dataclass(frozen=True)
class Exchanged:
    """What a rank knows after a run, and which way its units went."""

    outcome: Outcome
    ways: Counter[str]
    """Names of the classes of units, with whether a collective carried them."""
    far_bytes: int = 0
    """Bytes of all-to-alls that have left this rank's node."""


def run_by(rank: int, case: Case, kinds: Sequence[str], nodes: str = "") -> dict[str, Exchanged]:
    """Train a case once by each kind of exchange, each rank on the node that it plays."""
    with mock.patch.dict(os.environ, {"GROUP_RANK": nodes[rank]} if nodes else {}):
        return {kind: _run_by(rank, case, kind, nodes) for kind in kinds}


def _run_by(rank: int, case: Case, kind: str, nodes: str) -> Exchanged:
    ways: Counter[str] = Counter()
    far: list[int] = []
    all_to_all = dist.all_to_all_single

    def counting(into: Tensor, given: Tensor, *splits: Any, group: Any, **more: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        rows = splits[1] if splits else [1] * len(ranks)
        sent = sum(n for n, peer in zip(rows, ranks, strict=True) if nodes[peer] != nodes[rank])
        far.append(sent * given[0].numel() * given.element_size())
        return all_to_all(into, given, *splits, group=group, **more)

    def noting(found: Any) -> Any:
        def note(routes: Routes, *args: Any) -> Any:
            way = found(routes, *args)
            if way is not None and way.travels:
                by = "messages" if way.group is None else "collective"
                ways[f"{type(way).__name__} {by}"] += 1
            return way

        return note

    case = replace(case, options=(*case.options, ("exchange", kind)))
    with (
        mock.patch.object(Routes, "pulled", noting(Routes.pulled)),
        mock.patch.object(Routes, "pushed", noting(Routes.pushed)),
        mock.patch.object(dist, "all_to_all_single", counting if nodes else all_to_all),
    ):
        outcome = train(rank, case)
    return Exchanged(outcome, ways, sum(far))
