"""Modules whose layers change the hidden state's shape or return losses of their own."""

from typing import Any

import lightning as L
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hetero import HeteroStrategy, ParallelPlan
from tests.toy import quiet

WIDTH = 8
NUM_TOKENS = 8
BATCH = 4
NUM_STEPS = 3


class Layer(nn.Module):
    """Changes width, tokens or dtype of the hidden state, as its kind says."""

    def __init__(self, kind: str, index: int) -> None:
        super().__init__()
        widths = [WIDTH, 12, 4, WIDTH] if kind == "width" else [WIDTH] * 4
        self.linear = nn.Linear(widths[index], widths[index + 1])
        self.kind, self.index = kind, index

    def forward(self, x: Tensor, scale: Tensor, rest: Any = None) -> Any:
        y = torch.tanh(self.linear(x)) * scale
        if self.kind == "returned":
            return y, {"loss": y.square().mean(), "rows": len(y)}
        if self.kind == "handed on":
            # The first layer makes what all of them use, as T5's do.
            rest = y[:, :, :2] if rest is None else rest
            return y * rest.sum(-1, keepdim=True), rest
        if self.kind == "pool":
            # Half the tokens behind the first layer, and all of them again behind the second.
            return [y[:, ::2], y.repeat_interleave(2, 1), y][self.index]
        if self.kind == "ragged":
            # The data say how many tokens go on.
            return y[:, : 2 + int((x.detach().sum(-1) > 0).sum()) % 4]
        if self.kind == "dtype":
            return y.bfloat16() if self.index == 0 else y
        return y


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList([Layer(kind, index) for index in range(3)])
        self.head = nn.Linear(WIDTH, 1)
        self.kind = kind
        self.found: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.found["losses"] = []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.kind == "dtype"):
            x = self.embed(x).float()
            scale = torch.linspace(0.5, 1.5, NUM_TOKENS)[:, None]
            rest: Any = None
            for layer in self.layers:
                # What a layer gets besides the hidden state may depend on its shape.
                output = layer(x, scale[: x.shape[1]], rest)
                x, rest = output if isinstance(output, tuple) else (output, None)
                if self.kind == "returned":
                    self.found["losses"].append(rest["loss"] * rest["rows"])
        return self.head(x.float()).mean(1)

    def auxiliary(self) -> Any:
        """Return the sum of what the layers returned."""
        return sum(self.found["losses"]) if self.kind == "returned" else 0.0


class Module(L.LightningModule):
    """A regression; losses of steps and what validation logs are what runs compare."""

    layers = "net.layers"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net: Any = self.make_net(kind)
        self.losses: list[float] = []

    def make_net(self, kind: str) -> nn.Module:
        return Net(kind)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        loss: Tensor = F.mse_loss(self.net(x), y) + 0.1 * self.net.auxiliary()
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 8},
    "olmoe": {"num_experts": 4},
}


class Router(Module):
    """A Hugging Face mixture of experts; a part of its loss needs the logits of all routers."""

    layers = "net.model.layers"

    def make_net(self, kind: str) -> nn.Module:
        config = transformers.AutoConfig.for_model(
            kind,
            vocab_size=11,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_experts_per_tok=2,
            initializer_range=0.2,
            pad_token_id=0,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
            **EXPERTS[kind],
        )
        net: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return net

    def loss(self, batch: Any) -> Tensor:
        ids = 1 + (3 * batch[0][..., 0]).long().abs() % 10
        outputs = self.net(input_ids=ids, labels=ids)
        assert len(outputs.router_logits) == 3, [tuple(i.shape) for i in outputs.router_logits]
        loss: Tensor = outputs.loss
        return loss


def loader(batch_size: int) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(BATCH * NUM_STEPS, NUM_TOKENS, 3, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(-1)[:, :1]), batch_size=batch_size)


def fit(module: Module, plan: dict[str, Any] | None, batch_size: int = BATCH) -> None:
    """Train and validate, under a plan or on a single device that sees its micro-batches."""
    options: dict[str, Any] = {"devices": 1, "accumulate_grad_batches": BATCH // batch_size}
    if plan is not None:
        found = ParallelPlan.from_dict(plan)
        strategy = HeteroStrategy(
            found,
            num_microbatches=2,
            layers=module.layers,
            whole_after_run=True,
            allow_mixing=True,  # Losses of layers and routers are of a micro-batch.
        )
        options = {"strategy": strategy, "devices": max(found.ranks) + 1}
    trainer = L.Trainer(
        **quiet(max_epochs=1, num_sanity_val_steps=0), **options, use_distributed_sampler=False
    )
    trainer.fit(module, loader(batch_size), loader(batch_size))


def train_kinds(
    rank: int, kinds: list[str], plan: dict[str, Any] | None, batch_size: int = BATCH
) -> dict[str, list[float]]:
    """Return losses, the validation's last, and a sum over each parameter, by kind."""
    results = {}
    for kind in kinds:
        L.seed_everything(5, verbose=False)
        module = Router(kind) if kind in EXPERTS else Module(kind)
        fit(module, plan, batch_size)
        # Lightning has divided losses by the number of micro-batches.
        count = BATCH // batch_size
        losses = [sum(module.losses[i : i + count]) for i in range(0, len(module.losses), count)]
        sums = [float(value.double().abs().sum()) for value in module.state_dict().values()]
        results[kind] = [*losses, float(module.trainer.callback_metrics["val"]), *sums]
    return results
