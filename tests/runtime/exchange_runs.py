"""Runs of one case under several ways of exchanging weights and gradients."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from lightning_hetero.runtime.exchange.routes import Routes
from tests.runtime.runs import Case, Outcome, train


@dataclass(frozen=True)
class Exchanged:
    """What a rank knows after a run, and which way its units went."""

    outcome: Outcome
    ways: Counter[str]
    """Names of the classes of units, with whether a collective carried them."""


def run_by(rank: int, case: Case, kinds: Sequence[str]) -> dict[str, Exchanged]:
    """Train a case once by each kind of exchange."""
    return {kind: _run_by(rank, case, kind) for kind in kinds}


def _run_by(rank: int, case: Case, kind: str) -> Exchanged:
    ways: Counter[str] = Counter()

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
    ):
        outcome = train(rank, case)
    return Exchanged(outcome, ways)
