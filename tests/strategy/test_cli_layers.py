"""A plan in LightningCLI YAML takes the layers as the plan's JSON does, and as a range."""

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from lightning_hetero import HeteroStrategy
from lightning_hetero.core.errors import PlanError

# jsonargparse looks for the shortest import path of each type, also at names that move.


def parse(layers):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(HeteroStrategy, "strategy")
    plan = f"{{pipelines: [{{stages: [{{ranks: [0], layers: {layers}}}]}}]}}"
    parsed = parser.parse_string(f"strategy: {{plan: {plan}}}")
    return parser.instantiate(parsed).strategy._request.plan


@pytest.mark.parametrize("layers", ["[0, 4]", '"range(0, 4)"', '"range(4)"', '"[0, 4]"'])
def test_layers_are_a_list_or_a_range(layers):
    assert parse(layers).pipelines[0].stages[0].layers == range(4)


@pytest.mark.parametrize("layers", ["[0, 4, 5, 6]", "[0, x]", "null", "all"])
def test_what_is_no_range_is_refused(layers):
    with pytest.raises((ArgumentError, PlanError)):
        parse(layers)
