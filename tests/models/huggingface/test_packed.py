"""Packed samples reach the varlen attention, and none sees another."""

import copy
import pickle
from dataclasses import replace
from types import SimpleNamespace

import lightning as L
import pytest
import torch
import transformers
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_hetero.core.errors import BatchError, ModelError
from lightning_hetero.data import HeteroDataModule
from lightning_hetero.models import pack_samples
from lightning_hetero.models.huggingface import packed_inputs, use_packed_attention
from tests.runtime.huggingface_runs import CONFIGS, VOCABULARY, auto_class, make_model
from tests.toy import quiet

LENGTHS = [7, 1, 10, 3]
NUM_LAYERS = 4


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    return make_model(request.param)


@pytest.fixture
def llama():
    torch.manual_seed(0)
    return make_model("llama")


def samples(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]


def gradients(model, loss):
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {name: g for name, g in zip(parameters, found, strict=True) if g is not None}


class AttentionWork(TorchFunctionMode):
    """Counts the pairs of tokens that SDPA multiplies, and its calls with a mask."""

    def __init__(self):
        super().__init__()
        self.pairs = self.masks = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            query, key, _ = args
            self.pairs += query.shape[0] * query.shape[-2] * key.shape[-2]
            self.masks += kwargs.get("attn_mask") is not None
        return func(*args, **(kwargs or {}))


def test_packed_samples_padded_rows_and_losses_are_those_of_each_sample_alone(model):
    rows = samples()
    weights = torch.randn(sum(LENGTHS), VOCABULARY, generator=torch.Generator().manual_seed(2))
    alone = torch.cat([model(input_ids=row[None]).logits[0] for row in rows])
    expected = gradients(model, (alone * weights).sum())
    use_packed_attention(model)
    batch = pack_samples(rows)
    packed = model(**packed_inputs(batch)).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)
    found = gradients(model, (packed * weights).sum())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(float(value.abs().max()), 1.0)
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5 * scale, msg=name)

    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(rows, batch_first=True, padding_value=2)
    mask = pad([torch.ones_like(row) for row in rows], batch_first=True)
    padded = model(input_ids=ids, attention_mask=mask).logits[mask.bool()]
    torch.testing.assert_close(padded, alone, rtol=1e-5, atol=1e-5)

    if isinstance(model, transformers.BertForMaskedLM):
        batch = replace(batch, labels=batch.input_ids.masked_fill(batch.input_ids % 3 > 0, -100))
    output = model(**packed_inputs(batch, labels=True))
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits[0], batch.labels))


def test_positions_of_roberta_begin_behind_its_padding():
    config = make_model("bert").config.to_dict()
    roberta = auto_class("bert").from_config(transformers.RobertaConfig(**config))
    rows = samples()
    alone = torch.cat([roberta(input_ids=row[None]).logits[0] for row in rows])
    use_packed_attention(roberta)
    packed = roberta(**packed_inputs(pack_samples(rows))).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


def test_attention_costs_the_sum_of_squares_and_no_mask_is_made(model):
    use_packed_attention(model)
    # Shorter than the windows of gemma3, which alone need masks on CPU.
    lengths = [4, 1, 3, 2, 4]
    with AttentionWork() as work:
        model(**packed_inputs(pack_samples(samples(lengths))))
    assert work.pairs == NUM_LAYERS * sum(length**2 for length in lengths)
    assert work.masks == 0


def test_generation_goes_on_with_a_cache(llama):
    ids = samples([5])[0][None]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    plain = llama.generate(ids, **options)
    use_packed_attention(llama)
    assert torch.equal(llama.generate(ids, **options), plain)


def test_a_copy_and_a_pickled_model_stay_packed(llama):
    inputs = packed_inputs(pack_samples(samples()))
    use_packed_attention(llama)
    expected = llama(**inputs).logits
    for copied in (copy.deepcopy(llama), pickle.loads(pickle.dumps(llama))):
        with AttentionWork() as work:
            assert torch.equal(copied(**inputs).logits, expected)
        assert work.pairs == NUM_LAYERS * sum(length**2 for length in LENGTHS)


def tiny(name, **config):
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(name, **config)
        if name == "t5":
            return transformers.T5ForConditionalGeneration(config)
        return auto_class(name).from_config(config)


@pytest.mark.parametrize(
    ("name", "config", "why"),
    [
        ("mamba", {"num_hidden_layers": 2}, "state|layers"),
        ("qwen3_next", {"num_hidden_layers": 4, "num_experts": 4}, "linear_attention"),
        ("llama4_text", {"num_hidden_layers": 4, "num_local_experts": 2}, "chunked_attention"),
        ("t5", {"num_layers": 2}, "one sequence to another"),
    ],
)
def test_models_whose_packed_samples_would_see_each_other_are_refused(name, config, why):
    with pytest.raises(ModelError, match=f"{why}.* padded batches"):
        use_packed_attention(tiny(name, **config))
    with pytest.raises(ModelError, match="Linear holds no Hugging Face model"):
        use_packed_attention(torch.nn.Linear(2, 2))


class Trained(L.LightningModule):
    """A Hugging Face model as users hold it; made when Lightning asks for it if `late`."""

    def __init__(self, make, *, late):
        super().__init__()
        self.make, self.model = make, None if late else make()
        self.losses = []

    def configure_model(self):
        self.model = self.model or self.make()

    def training_step(self, batch):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit_packed(module):
    data = HeteroDataModule(samples(), tokens_per_step=30, context_length=30)
    L.Trainer(max_epochs=1, **quiet()).fit(module, data)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.parametrize("late", [False, True])
def test_under_a_data_module_samples_do_not_see_each_other(llama, late):
    module = Trained(lambda: copy.deepcopy(llama), late=late)
    fit_packed(module)
    rows = samples()
    alone = [llama(input_ids=row[None]).logits[0, :-1] for row in rows]
    targets = torch.cat([row[1:] for row in rows])
    expected = F.cross_entropy(torch.cat(alone), targets).item()
    assert module.losses == pytest.approx([expected], rel=1e-5)


def test_a_data_module_refuses_models_whose_samples_would_see_each_other():
    model = tiny("mamba", num_hidden_layers=2)
    data = HeteroDataModule(samples(), tokens_per_step=30, context_length=30)
    data.trainer = SimpleNamespace(lightning_module=Trained(lambda: model, late=False))
    with pytest.raises(ModelError, match=r"HeteroDataModule packs .* `collate` that pads"):
        data.setup("fit")
    padded = HeteroDataModule(samples(), tokens_per_step=30, context_length=30, collate=list)
    padded.trainer = data.trainer
    padded.setup("fit")


def test_what_the_kernels_cannot_do_is_refused_when_it_is_asked_for():
    config = {"num_hidden_layers": 1, "vocab_size": VOCABULARY, "hidden_size": 16, "head_dim": 8}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 16}
    inputs = packed_inputs(pack_samples(samples()))
    for name, more, why in (
        ("llama", {"attention_dropout": 0.25}, "drops 25% of the attention"),
        ("gemma2", {}, "uses softcap"),
        ("phimoe", {"sliding_window": 8, "num_local_experts": 2}, "windows only in its masks"),
    ):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(name, **config, **more, pad_token_id=0)
        )
        use_packed_attention(model)
        with pytest.raises(ModelError, match=why):
            model.train()(**inputs)


class Forgetful(transformers.LlamaForCausalLM):
    """Hands on only what it knows."""

    def forward(self, input_ids, position_ids=None, **kwargs):
        return super().forward(input_ids=input_ids, position_ids=position_ids, use_cache=False)


def test_a_model_that_forgets_where_samples_begin_is_refused():
    model = Forgetful(make_model("llama").config)
    use_packed_attention(model)
    for _ in range(2):
        with pytest.raises(ModelError, match="doesn't hand cu_seq_lens_q on"):
            model(**packed_inputs(pack_samples(samples())))
    rows = torch.stack(samples([5, 5]))
    assert model(input_ids=rows).logits.shape == (2, 5, VOCABULARY)


REFUSED_INPUTS = [
    # A mask, and several rows.
    (lambda batch: {**batch, "attention_mask": torch.ones(1, 21)}, "leave the mask out"),
    (lambda batch: {**batch, "input_ids": batch["input_ids"].repeat(2, 1)}, "is one row"),
    # Ids without borders, as users hand them on. Transformers finds samples by positions in no
    # bidirectional model, and in none with a cache.
    *(
        (inputs, r"of 4 packed samples .*model\(\*\*batch\)")
        for inputs in (
            lambda batch: {"input_ids": batch["input_ids"]},
            lambda batch: {
                "input_ids": batch.input_ids[None, :-1],
                "labels": batch["labels"][:, :-1],
            },
            lambda batch: {"input_ids": batch.to("cpu").input_ids.unsqueeze(0), "use_cache": False},
            lambda batch: {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"]},
        )
    ),
]


@pytest.mark.parametrize(("inputs", "told"), REFUSED_INPUTS)
def test_inputs_in_which_packed_samples_would_see_each_other_are_refused(llama, inputs, told):
    use_packed_attention(llama)
    with pytest.raises(BatchError, match=told):
        llama(**inputs(pack_samples(samples())))


def test_one_sample_other_rows_and_a_mask_that_keeps_samples_apart_are_what_they_seem(llama):
    use_packed_attention(llama)
    batch = pack_samples(samples())
    with pytest.raises(BatchError, match="LlamaForCausalLM got the token ids of 4"):
        llama(batch["input_ids"])
    first, second = batch.cu_seqlens[2:4].tolist()
    logits = llama(**packed_inputs(batch)).logits[:, first:second]
    torch.testing.assert_close(llama(batch["input_ids"][:, first:second]).logits, logits)
    llama(batch.input_ids[None].clone())
    llama(pack_samples(samples()[:1])["input_ids"])
    llama(batch["input_ids"], attention_mask=torch.ones(1, sum(LENGTHS)))
