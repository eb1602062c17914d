"""Initial values of slices: the same under any plan, and no more than slices in memory or read."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hetero.core.errors import ModelError
from lightning_hetero.core.plan import ParallelPlan
from lightning_hetero.exchange.owners import assign_owners
from lightning_hetero.exchange.slices import Ownership
from lightning_hetero.models import HeteroLM, LMConfig
from lightning_hetero.models.huggingface import load_pretrained
from lightning_hetero.runtime.ranks.communicators import Communicators
from lightning_hetero.runtime.setup.layout import ModelLayout
from lightning_hetero.runtime.setup.materialize import materialize
from lightning_hetero.runtime.slices.weights import SliceStore, narrow_rows
from lightning_hetero.runtime.tensor_parallel.sharding import TensorParallel
from tests.plans import pipeline, plan_of, stage
from tests.runtime.huggingface_runs import CONFIGS, auto_class, make_model
from tests.toy import GPT

ALONE = plan_of(pipeline(stage(0, 0, 4)))
STAGED = plan_of(pipeline(stage(2, 0, 1), stage(0, 1, 4)), pipeline(stage(1, 0, 4)))
SHARDED = plan_of(pipeline(stage([3, 1], 0, 1), stage([0, 2], 1, 4)))
PLANS = {"alone": ALONE, "staged": STAGED, "sharded": SHARDED}


class Holder(nn.Module):
    """What a LightningModule is to the runtime."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def on_meta(make: Any) -> Holder:
    with torch.device("meta"):
        return Holder(make())


def materialized(
    module: nn.Module, plan: ParallelPlan, global_rank: int, *, seed: int = 3
) -> SliceStore:
    """Materialize one rank's slices; what exists on all ranks alike needs no process group."""
    layout = ModelLayout.of(module)
    if plan.has_tensor_parallelism:
        layout = TensorParallel(module, layout).layout
    world_size = len(plan.ranks)
    store = SliceStore(
        layout,
        assign_owners(layout.specs, plan, world_size=world_size, ownership=Ownership.HOLDERS),
        global_rank=global_rank,
        device=torch.device("cpu"),
    )
    comms = Communicators(global_rank=0, world_size=1)
    materialize(module, store, comms, seed=seed)
    return store


def wholes(modules: list[nn.Module], plan: ParallelPlan, *, seed: int = 3) -> dict[str, Tensor]:
    """Put the slices of a plan's ranks together."""
    stores = [materialized(m, plan, rank, seed=seed) for rank, m in enumerate(modules)]
    found = {}
    for name, spec in stores[0].specs.items():
        whole = torch.full(spec.shape, float("nan"))
        for store in stores:
            for start, stop in store.kept[name]:
                rows = narrow_rows(whole, spec, start, stop)
                rows.copy_(store.masters[name].detach().reshape(rows.shape))
        found[name] = whole
    return found


def drawn(make: Any, plan_name: str, *, seed: int = 3) -> dict[str, Tensor]:
    plan = ParallelPlan.from_dict(PLANS[plan_name])
    return wholes([on_meta(make) for _ in plan.ranks], plan, seed=seed)


def assert_bitwise_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("name", CONFIGS)
def test_drawn_weights_do_not_depend_on_the_plan(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    expected = drawn(lambda: make_model(name), "alone")
    for plan_name in ("staged", "sharded"):
        assert_bitwise_equal(drawn(lambda: make_model(name), plan_name), expected)
    assert torch.equal(torch.get_rng_state(), state), "the generator was left elsewhere"


@pytest.mark.parametrize("name", CONFIGS)
def test_drawn_weights_are_distributed_as_the_models_own(name: str) -> None:
    found = drawn(lambda: make_model(name), "alone")
    torch.manual_seed(1)
    for parameter_name, own in Holder(make_model(name)).named_parameters():
        value = found[parameter_name]
        spread = float(own.detach().std()) if own.numel() > 1 else 0.0
        slack = 0.02 + 4 * spread / own.numel() ** 0.5
        assert abs(float(value.mean() - own.detach().mean())) < slack, parameter_name
        assert abs(float(value.std(correction=0)) - spread) < slack, parameter_name


def test_the_reference_model_is_drawn_by_its_modules_and_by_the_seed() -> None:
    config = LMConfig(vocab_size=19, hidden_size=16, num_layers=4, num_heads=2, tie_embeddings=True)
    first, again = (drawn(lambda: HeteroLM(config), name) for name in ("alone", "sharded"))
    assert_bitwise_equal(again, first)
    other = drawn(lambda: HeteroLM(config), "alone", seed=4)
    layers = [f"model.layers.{index}.mlp.up_proj.weight" for index in range(4)]
    assert len({float(first[name].sum()) for name in layers}) == 4, "layers are alike"
    assert not any(torch.equal(first[name], other[name]) for name in layers)
    assert float(first[layers[0]].std()) == pytest.approx(config.init_std, rel=0.1)
    assert bool((first["model.norm.weight"] == 1).all())


class Watched(nn.Module):
    """Counts how many bytes of it exist whenever a part of it is initialised."""

    sets_bias = True

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 64)
        self.peak_bytes = 0
        self.drawn: list[nn.Module] = []

    def _init_weights(self, module: nn.Module) -> None:
        existing = [p.numel() * p.itemsize for p in self.parameters() if not p.is_meta]
        self.peak_bytes = max(self.peak_bytes, sum(existing))
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.ones_(module.weight)
            if self.sets_bias and isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
            self.drawn += [] if module.weight.is_meta else [module]


def test_a_rank_draws_only_what_it_owns_one_unit_at_a_time() -> None:
    plan = ParallelPlan.from_dict(plan_of(pipeline(stage(0, 0, 1), stage(1, 1, 4))))
    first, last = (on_meta(Watched) for _ in range(2))
    for rank, module in enumerate((first, last)):
        materialized(module, plan, rank)
    assert first.model.drawn == [first.model.embedding, first.model.layers[0]]
    assert last.model.drawn == [*last.model.layers[1:], last.model.head]
    assert first.model.peak_bytes == 64 * 8 * 4
    assert last.model.peak_bytes == (64 * 8 + 64) * 4


def test_a_module_with_weights_keeps_them_and_lends_none_to_initialisers() -> None:
    module = on_meta(Watched)
    module.model.layers[2] = nn.Linear(8, 8)
    kept = module.model.layers[2].weight.detach().clone()
    found = wholes([module], ParallelPlan.from_dict(ALONE))
    assert torch.equal(found["model.layers.2.weight"], kept)
    assert bool((found["model.layers.1.weight"] == 1).all())


def test_what_the_model_does_not_set_is_reset_by_its_module() -> None:
    module = on_meta(Watched)
    module.model.sets_bias = False
    found = wholes([module], ParallelPlan.from_dict(ALONE))
    assert bool((found["model.head.weight"] == 1).all())
    assert 0.1 < float(found["model.head.bias"].abs().max()) < 1 / 8**0.5


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_what_nothing_sets_is_refused_by_name(kind: str) -> None:
    with torch.device("meta"):
        model = (
            GPT(2, 8, tied=False)
            if kind == "parameter"
            else HeteroLM(LMConfig(vocab_size=5, hidden_size=8, num_layers=2, num_heads=1))
        )
        if kind == "buffer":
            model.register_buffer("angles", torch.ones(3))
    plan = ParallelPlan.even(world_size=1, num_layers=2, num_stages=1)
    name = "Parameter model.wpe" if kind == "parameter" else "Buffer model.angles"
    with pytest.raises(ModelError, match=rf"{name} is on the meta device.*reset_parameters"):
        materialized(Holder(model), plan, 0)


class Masked(nn.Linear):
    """Has a mask that the model sets, the first values at least."""

    def __init__(self, num_set: int) -> None:
        super().__init__(2, 2)
        self.num_set = num_set
        self.register_buffer("mask", torch.empty(2, dtype=torch.bool))

    def _init_weights(self, _: nn.Module) -> None:
        self.mask[: self.num_set] = torch.tensor([False, True])[: self.num_set]


def test_a_mask_may_hold_any_value_and_is_refused_if_the_model_sets_a_part() -> None:
    plan = ParallelPlan.even(world_size=1, num_layers=1, num_stages=1)
    whole, part = (on_meta(lambda n=n: nn.Sequential(Masked(n))) for n in (2, 1))
    materialized(whole, plan, 0)
    assert whole.get_buffer("model.0.mask").tolist() == [False, True]
    with pytest.raises(ModelError, match=r"Buffer model\.0\.mask is on the meta device"):
        materialized(part, plan, 0)


@pytest.mark.parametrize("plan_name", PLANS)
@pytest.mark.parametrize("name", CONFIGS)
def test_each_rank_reads_the_bytes_of_its_slices_of_a_folder(
    name: str, plan_name: str, tmp_path: Any
) -> None:
    torch.manual_seed(2)
    make_model(name).save_pretrained(tmp_path, max_shard_size="6KB")
    expected = Holder(auto_class(name).from_pretrained(tmp_path))
    plan = ParallelPlan.from_dict(PLANS[plan_name])
    modules = [Holder(load_pretrained(tmp_path, auto_class(name))) for _ in plan.ranks]
    found = wholes(modules, plan)
    assert_bitwise_equal(found, {n: p.detach() for n, p in expected.named_parameters()})
    for module in modules:
        for buffer_name, buffer in expected.named_buffers():
            assert torch.equal(module.get_buffer(buffer_name), buffer), buffer_name
    read = [module.model.weight_source.num_bytes_read for module in modules]
    owned = [sum(p.numel() * p.itemsize for p in set(m.parameters())) for m in modules]
    assert read == owned
    assert sum(read) == sum(p.numel() * p.itemsize for p in expected.parameters())


def test_what_a_folder_lacks_is_drawn_alike_under_any_plan(tmp_path: Any) -> None:
    base = make_model("llama").model
    base.save_pretrained(tmp_path)
    found = []
    for plan_name in PLANS:
        plan = ParallelPlan.from_dict(PLANS[plan_name])
        with pytest.warns(UserWarning, match="drawn anew"):
            modules = [Holder(load_pretrained(tmp_path)) for _ in plan.ranks]
        found.append(wholes(modules, plan))
        assert torch.equal(found[-1]["model.model.norm.weight"], base.norm.weight)
        assert_bitwise_equal(found[-1], found[0])
    assert float(found[0]["model.lm_head.weight"].std()) == pytest.approx(0.2, rel=0.2)


def test_a_model_that_was_changed_after_its_folder_was_opened_is_refused(tmp_path: Any) -> None:
    make_model("llama").save_pretrained(tmp_path)
    plan = ParallelPlan.from_dict(ALONE)
    resized = load_pretrained(tmp_path)
    resized.resize_token_embeddings(40, mean_resizing=False)
    with pytest.raises(
        ModelError, match=r"embed_tokens.weight has shape \(40, 16\), but \(29, 16\)"
    ):
        materialized(Holder(resized), plan, 0)
    # What adapters do: the weight is still there, under another name.
    adapted = load_pretrained(tmp_path)
    attention = adapted.model.layers[1].self_attn
    attention.q_proj = nn.Sequential(attention.q_proj)
    with pytest.raises(
        ModelError, match=r"layers.1.self_attn.q_proj.weight'\].*q_proj.0.weight'\]"
    ):
        materialized(Holder(adapted), plan, 0)
