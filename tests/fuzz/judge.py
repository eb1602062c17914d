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
        return bool(np.allclose(found, wanted, rtol=relative, atol=relative * self.zero))


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
    if "train" in outcomes[0].seen and not late:
        return f"refused after training steps: {outcomes[0].refused}"
    return None


def _difference(recipe: Recipe, expected: Outcome, outcomes: list[Outcome]) -> str | None:
    tolerance = Tolerance.of(recipe)
    for rank, outcome in enumerate(outcomes):
        if not tolerance.close(outcome.losses, expected.losses):
            return f"losses of rank {rank}: {outcome.losses}, not {expected.losses}"
        if outcome.metrics.keys() != expected.metrics.keys():
            return f"metrics of rank {rank}: {outcome.metrics}, not {expected.metrics}"
        for name, value in expected.metrics.items():
            if not tolerance.close(outcome.metrics[name], value):
                return f"{name} of rank {rank}: {outcome.metrics[name]}, not {value}"
    return _different_state(tolerance, expected, outcomes[0]) or _different_predictions(
        recipe, expected, outcomes
    )


def _different_state(tolerance: Tolerance, expected: Outcome, outcome: Outcome) -> str | None:
    if outcome.state.keys() != expected.state.keys():
        return f"names in the checkpoint: {outcome.state.keys() ^ expected.state.keys()} differ"
    for name, value in expected.state.items():
        found = outcome.state[name]
        if found.shape != value.shape or not tolerance.close(found, value, is_loss=False):
            return f"{name} in the checkpoint is {found.ravel()[:4]}, not {value.ravel()[:4]}"
    return None


def _different_predictions(
    recipe: Recipe, expected: Outcome, outcomes: list[Outcome]
) -> str | None:
    plan, _ = PLANS[recipe.resumed_plan or recipe.plan]
    assert plan is not None
    found = [
        item
        for pipeline in plan["pipelines"]
        for item in outcomes[pipeline["stages"][-1]["ranks"][0]].predictions
    ]
    wanted = np.concatenate(expected.predictions)
    together = np.concatenate(found) if found else np.zeros(0)
    if together.shape != wanted.shape:
        return f"predictions are of shape {together.shape}, not {wanted.shape}"
    close = Tolerance.of(recipe).close(together, wanted, is_loss=False)
    return None if close else "predictions differ"
