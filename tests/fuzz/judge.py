"""Run one case and judge it: equal to plain Lightning, refused at the first step, or a defect."""

import tempfile
from dataclasses import dataclass

import numpy as np

from tests.fuzz.recipes import PLANS, Recipe
from tests.fuzz.runs import Outcome, run_alone, run_on_plan
from tests.processes import ProcessFailed, ProcessPool

EQUAL, REFUSED, DEFECT, IMPOSSIBLE = "equal", "refused", "defect", "impossible"


@dataclass(frozen=True)
class Tolerance:
    """How far rounding may take runs apart."""

    loss: float = 1e-4
    weight: float = 1e-3
    zero: float = 0.01
    """How far off zero a number may be, as a share of the others."""

    @classmethod
    def of(cls, recipe: Recipe) -> "Tolerance":
        """Return that of a recipe: where layers round to bfloat16, its 8 bits count."""
        halved = recipe.shape == "half precision"
        return cls(loss=1e-3, weight=2e-2, zero=1.0) if halved else cls()

    def close(self, found: object, wanted: object, *, is_loss: bool = True) -> bool:
        """Return whether two arrays are alike but for rounding."""
        relative = self.loss if is_loss else self.weight
        are_alike = np.shape(found) == np.shape(wanted)
        return are_alike and np.allclose(found, wanted, rtol=relative, atol=relative * self.zero)


@dataclass(frozen=True)
class Verdict:
    """What became of a case."""

    kind: str
    recipe: Recipe
    told: str = ""
    """The refusal, or what is wrong."""


def judge(pool: ProcessPool, recipe: Recipe) -> Verdict:
    """Run a case on one device and under its plan; impossible if plain Lightning can't."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            expected = pool.run(run_alone, 1, recipe, folder)[0]
        except ProcessFailed as failed:
            return Verdict(IMPOSSIBLE, recipe, str(failed))
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcomes = pool.run(run_on_plan, PLANS[recipe.plan][1], recipe, folder, timeout_s=60.0)
        except ProcessFailed as failed:
            return Verdict(DEFECT, recipe, f"no HeteroError: {failed}")
    refusals = [outcome.refused for outcome in outcomes]
    wrong = _wrong_refusal(recipe, expected, outcomes) if any(refusals) else None
    wrong = wrong or (None if any(refusals) else _difference(recipe, expected, outcomes))
    if wrong is not None:
        return Verdict(DEFECT, recipe, wrong)
    own = next((text for text in refusals if text and not text.startswith("PeerError")), None)
    return Verdict(REFUSED if any(refusals) else EQUAL, recipe, own or "")


def _wrong_refusal(recipe: Recipe, expected: Outcome, outcomes: list[Outcome]) -> str | None:
    if not all(outcome.refused for outcome in outcomes):
        return f"only some ranks refuse: {[outcome.refused for outcome in outcomes]}"
    if all(str(outcome.refused).startswith("PeerError") for outcome in outcomes):
        return f"no rank says why: {outcomes[0].refused}"
    for outcome in outcomes:
        begins = expected.losses[: len(outcome.losses)]
        if not Tolerance.of(recipe).close(outcome.losses, begins):
            return f"losses {outcome.losses} are not {begins}, and then: {outcome.refused}"
    late = recipe.outer in ("later loss", "decoded in validation") or recipe.changes_later
    # Whether two means have the same targets is seen in the first step in which they haven't.
    late = late or recipe.reduction == "two losses"
    if outcomes[0].has_trained and not late:
        return f"refused after training steps: {outcomes[0].refused}"
    return None


def _difference(recipe: Recipe, expected: Outcome, outcomes: list[Outcome]) -> str | None:
    tolerance = Tolerance.of(recipe)
    for rank, outcome in enumerate(outcomes):
        for what in ("metrics", "state"):
            names, wanted = getattr(outcome, what).keys(), getattr(expected, what).keys()
            if names != wanted:
                return f"{what} of rank {rank}: {[*names]}, not {[*wanted]}"
        numbers = {"losses": (outcome.losses, expected.losses, True)}
        numbers |= {
            name: (outcome.metrics[name], value, True) for name, value in expected.metrics.items()
        }
        numbers |= {
            f"{name} in the checkpoint": (outcome.state[name], value, False)
            for name, value in expected.state.items()
        }
        for name, (found, value, is_loss) in numbers.items():
            if not tolerance.close(found, value, is_loss=is_loss):
                return f"{name} of rank {rank}: {found}, not {value}"
    plan, _ = PLANS[recipe.resumed_plan or recipe.plan]
    ends = [pipeline["stages"][-1]["ranks"][0] for pipeline in plan["pipelines"]]
    predictions = [item for rank in ends for item in outcomes[rank].predictions]
    found = np.concatenate(predictions) if predictions else np.zeros(0)
    close = tolerance.close(found, np.concatenate(expected.predictions), is_loss=False)
    return None if close else "predictions differ"
