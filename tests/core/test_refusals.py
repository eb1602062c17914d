"""Wrong arguments are refused by value, with a remedy; `test_files` has wrong files."""

import dataclasses
import json

import pytest

from lightning_hetero.core.errors import ConfigurationError, ModelError, PlanError
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.holders import holdings_of
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership, ParameterSpec

TWO = ParallelPlan.even(world_size=2, num_layers=3)
SHARED = dataclasses.replace(TWO, owner_shares=(1, 2))
QKV = ParameterSpec(name="qkv", shape=(18, 2), layer=0, tp_dim=0, tp_blocks=3)
LOST = ParameterSpec(name="lost", shape=(4,), layer=3)


def even(world_size, num_layers, num_stages, tp_degree=1):
    return ParallelPlan.even(
        world_size=world_size, num_layers=num_layers, num_stages=num_stages, tp_degree=tp_degree
    )


def own(specs, rule):
    return assign_owners(specs, TWO, world_size=2, ownership=Ownership(rule))


@pytest.mark.parametrize(
    ("error", "build", "said"),
    [
        (PlanError, lambda: even(6, 4, 2, (1, 2, 3)), "2 stages.*one degree for each"),
        (PlanError, lambda: even(6, 8, 4), "6 processes.*4 stages.*divides 6"),
        (PlanError, lambda: even(4, 3, 4), "3 layers.*4 stages.*at most 3"),
        (PlanError, lambda: even(4, 3, 0), "4 processes.*0 stages"),
        (PlanError, lambda: TWO.check_world_size(1), "rank 1.*1 process.*Start 2 processes"),
        (PlanError, lambda: TWO.check_num_layers(6), "3 layers.*has 6.*end at layer 6"),
        (PlanError, lambda: SHARED.check_world_size(3), "are for 2 ranks but 3 processes"),
        (ConfigurationError, lambda: own([], "memory"), "needs a plan that says how much"),
        (ModelError, lambda: own([LOST], "holders"), "lost .*no stage .*3 layers"),
        (ModelError, lambda: list(holdings_of(QKV, even(4, 1, 1, 4))), "qkv .* 4 equal .*6"),
        (ModelError, lambda: ModelSpec.load("llama-9000"), "bert-large.*llama-70b"),
        (ModelError, lambda: ModelSpec.load("llama-7b").tuned(lora_rank=0), "1 or more"),
    ],
)
def test_a_wrong_argument_is_refused_with_its_values_and_a_remedy(error, build, said) -> None:
    with pytest.raises(error, match=said):
        build()


LORA = {"peft_type": "LORA", "r": 4, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type 'IA3'.*Plan its base with --model llama-7b"),
        ({"use_dora": True}, "without use_dora"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "without.* target_parameters"),
        ({"r": True}, "r True.*a whole r"),
        ({"r": "4"}, "a whole r"),
        ({"r": 0}, "it must be 1 or more"),
        ({"target_modules": ["c_attn"]}, "matrices of llama-7b are"),
        ({"modules_to_save": ["score"]}, "modules_to_save"),
        ({"base_model_name_or_path": None}, "Write the folder or name of the model"),
        ({"base_model_name_or_path": "nowhere"}, "Unknown model 'nowhere'"),
    ],
)
def test_an_adapter_whose_size_is_unknown_is_refused(tmp_path, changed, message) -> None:
    config = LORA | {"base_model_name_or_path": "llama-7b"} | changed
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        ModelSpec.load(tmp_path)
