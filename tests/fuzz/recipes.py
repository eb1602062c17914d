"""What a fuzzed case is made of: features of a module and of a run, drawn from a seed.

A recipe is plain data, so a failure is repeated by its seed: `python -m tests.fuzz --case SEED`.
"""

import random
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tests.plans import ALONE, COPIES, STAGES, pipeline, plan_of, stage

NUM_LAYERS = 3

PLANS: dict[str, tuple[dict[str, Any], int]] = {
    "alone": (ALONE, 1),
    "two stages": (STAGES, 2),
    "stages reversed": (plan_of(pipeline(stage(1, 0, 2), stage(0, 2, 3))), 2),
    "three stages": (plan_of(pipeline(stage(0, 0, 1), stage(2, 1, 2), stage(1, 2, 3))), 3),
    "a rank at both ends": (plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 2), stage(0, 2, 3))), 2),
    "data parallel": (COPIES, 2),
    "unequal pipelines": (
        plan_of(pipeline(stage(0, 0, 3)), pipeline(stage(2, 0, 1), stage(1, 1, 3))),
        3,
    ),
    "an idle rank": (plan_of(pipeline(stage(0, 0, 1), stage(2, 1, 3))), 3),
    "one rank before two": (plan_of(pipeline(stage(1, 0, 1), stage([2, 0], 1, 3))), 3),
    "two ranks before one": (plan_of(pipeline(stage([0, 1], 0, 2), stage(2, 2, 3))), 3),
}
TP_PLAN = {
    "embed": "vocab",
    "layers.*.up": "colwise_gather_output",
    "head": "colwise_gather_output",
}
"""Given where a plan has tensor-parallel stages."""
OWNERS = ("even", "holders", "parameter", "memory", "shares")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One case. A field's first choice is the ordinary one."""

    seed: int = 0
    arguments: str = "hidden"
    """How layers are called: hidden state alone, with a table before or behind it, by keyword."""
    table: str = "buffer"
    """Where that table comes from: a buffer, or a parameter outside the layers."""
    returned: str = "tensor"
    """What layers return: a tensor, a tuple with something unused, or with something used."""
    between: str = "nothing"
    """What the model does between layers."""
    inside: str = "nothing"
    """What layers do to their input."""
    shape: str = "kept"
    """How the middle layer changes the hidden state."""
    collected: str = "nothing"
    """What of the layers is used behind them."""
    checkpointed: str = "nothing"
    """What the model itself wraps in `torch.utils.checkpoint`."""
    outer: str = "plain"
    """How parameters outside the layers are used."""
    dropout: bool = False
    buffer: str = "nothing"
    """What layers count in buffers."""
    reduction: str = "mean"
    """How the step makes one loss of the tokens' losses."""
    metric: str = "nothing"
    """What the validation step measures, and by what."""
    groups: str = "one"
    """How `configure_optimizers` groups parameters."""
    frozen: str = "nothing"
    plan: str = "two stages"
    num_microbatches: int = 2
    later_plan: str | None = None
    """Changed to after the second step."""
    resumed_plan: str | None = None
    """The second epoch is a new run from the first one's checkpoint, under this plan."""
    accumulate: int = 1
    clip_val: float | None = None
    recompute: str = "none"
    """The strategy's `activation_checkpointing`; or the first layer of every stage, by the plan,
    with the others selectively or without; or as few as a budget of activations asks for, which
    leaves room for some."""
    redundancy: int = 0
    resumed_redundancy: int = 0
    """That of the new run."""
    owners: str = "auto"
    """The strategy's `ownership`; or unequal shares, by the plan."""
    unequal_sizes: bool = False
    """Whether micro-batches of the first pipeline hold more samples than others'."""

    def __str__(self) -> str:
        usual = asdict(Recipe())
        told = {name: value for name, value in asdict(self).items() if value != usual[name]}
        return ", ".join(f"{name}={value!r}" for name, value in told.items())

    @property
    def adds_losses(self) -> bool:
        """Whether the step makes something that isn't a mean over its target tokens."""
        return self.collected in ("hook", "logged hook", "loss on layers", "gates on layers")

    @property
    def changes_later(self) -> bool:
        """Whether something else runs after the first steps."""
        return self.frozen.endswith("epoch") or bool(self.later_plan or self.resumed_plan)

    @property
    def is_tensor_parallel(self) -> bool:
        """Whether a stage of any of its plans has several ranks."""
        return any(
            len(stage["ranks"]) > 1
            for name in (self.plan, self.later_plan, self.resumed_plan)
            if name is not None
            for pipeline in PLANS[name][0]["pipelines"]
            for stage in pipeline["stages"]
        )

    @property
    def num_pipelines(self) -> int:
        return len(PLANS[self.plan][0]["pipelines"])


_CHOICES: dict[str, tuple[Any, ...]] = {
    "arguments": ("hidden, table", "table, hidden", "keywords"),
    "table": ("parameter",),
    "returned": ("unused", "used"),
    "between": ("relu_", "add_", "scaled", "no-op"),
    "inside": ("changed in place",),
    "shape": ("shorter", "wider", "half precision"),
    "collected": (
        "sum of hidden states",
        "first hidden state",
        "hook",
        "logged hook",
        "loss on layers",
        "gates on layers",
    ),
    "checkpointed": ("layers", "layers, reentrant", "pairs of layers", "model"),
    "outer": (
        "tied",
        "mask before layers",
        "embedding added behind",
        "decoded in validation",
        "later loss",
        "L2",
        "weight of a layer",
        "embedding in layers",
    ),
    "dropout": (True,),
    "buffer": ("calls", "mean"),
    "reduction": ("sum", "masked mean", "two losses", "declared masked mean", "declared sum"),
    "metric": ("mean", "list", "collected", "outputs in a hook"),
    "groups": ("by size", "by shape"),
    "frozen": ("embedding", "first layer", "embedding until the second epoch"),
    "later_plan": tuple(PLANS),
    "resumed_plan": tuple(PLANS),
    "accumulate": (2,),
    "clip_val": (0.05,),
    "num_microbatches": (1, 4),
    "recompute": ("full", "first layers", "budget", "selective", "some selectively"),
}


def draw(seed: int) -> Recipe:
    """Return the case of a seed: a plan and one to four features that aren't the ordinary ones."""
    generator = random.Random(seed)
    plan = generator.choice(list(PLANS))
    names = generator.sample(list(_CHOICES), generator.randint(1, 4))
    drawn = {name: generator.choice(_CHOICES[name]) for name in names}
    for name in ("redundancy", "resumed_redundancy"):
        drawn[name] = int(generator.random() < 0.25)
    drawn["owners"] = generator.choice(("auto", "auto", *OWNERS))
    drawn["unequal_sizes"] = generator.random() < 0.25
    return _made_possible(replace(Recipe(seed=seed, plan=plan), **drawn))


def _made_possible(recipe: Recipe) -> Recipe:
    """Put back to ordinary what plain Lightning couldn't run, or has no oracle."""
    changes: dict[str, Any] = {}
    if recipe.table == "parameter" and recipe.arguments == "hidden":
        changes["arguments"] = "hidden, table"
    if recipe.collected == "sum of hidden states" and recipe.shape != "kept":
        changes["shape"] = "kept"
    if recipe.inside == "changed in place":
        # What the layer before returned, or what was collected, is no longer what it was.
        changes |= {"collected": "nothing", "checkpointed": "nothing", "recompute": "none"}
    if recipe.dropout:
        # The oracle takes one micro-batch a batch, so all must count alike.
        changes |= {"accumulate": 1, "reduction": "mean", "buffer": "nothing", "metric": "nothing"}
        changes |= {"later_plan": None, "resumed_plan": None, "unequal_sizes": False}
        changes |= {"num_microbatches": min(recipe.num_microbatches, 2)}
        # A log keeps the last batch's number, which there is the last micro-batch's.
        changes |= {"collected": "nothing"} if recipe.collected == "logged hook" else {}
    recipe = replace(recipe, **changes)
    num_ranks = PLANS[recipe.plan][1]
    unfit = {
        name: None
        for name in ("later_plan", "resumed_plan")
        if (plan := getattr(recipe, name)) is not None and PLANS[plan][1] > num_ranks
    }
    recipe = replace(recipe, **unfit)
    # A plan changes at the end of a step; an iteration under accumulation ends with its last batch.
    return recipe if recipe.later_plan is None else replace(recipe, accumulate=1)


def simpler(recipe: Recipe) -> list[Recipe]:
    """Return the recipe with one feature less, in every way: for shrinking a failure."""
    usual = Recipe()
    names = [item.name for item in fields(Recipe) if item.name not in ("seed", "plan")]
    changed = [name for name in names if getattr(recipe, name) != getattr(usual, name)]
    return [replace(recipe, **{name: getattr(usual, name)}) for name in changed]
