"""Whether samples meet in a loss is found by numbers, whatever functions make it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hetero.runtime.results.loss_trial import LossTrial, LossTrials
from lightning_hetero.runtime.results.recording import Recording
from lightning_hetero.runtime.results.targets import LossWatch

WEIGHT = nn.Parameter(torch.randn(4, 4))
LABELS = torch.tensor([0, -100, 2, 3, -100, 1])
ADJACENT = torch.eye(4).to_sparse()


def finds_meeting(
    make: Callable[[Tensor], Any],
    shape: tuple[int, ...] = (6, 4),
    num_samples: int = 6,
    *,
    is_cut: bool = False,
) -> bool:
    torch.manual_seed(0)
    x = torch.randn(shape, requires_grad=True)
    watch = LossWatch([], num_samples, LossTrial(None, num_samples, is_cut=is_cut))
    watch.leave_layers(x)
    try:
        loss = make(x @ WEIGHT)
    finally:
        watch.end()
    return watch.finds_meeting(loss, watch.reductions.of(loss))


def each(x: Tensor) -> Tensor:
    return F.cross_entropy(x, LABELS, reduction="none")


def is_sure(x: Tensor) -> Tensor:
    return x.softmax(-1).amax(-1) > 0.4


def changed_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 0] = 0.0
    y += 1
    return y.square().mean()


def masked(labels: Tensor) -> Tensor:
    mask = torch.ones(len(labels))
    for i, label in enumerate(labels.tolist()):
        mask[i] = label > 1
    return mask


def in_bfloat16(x: Tensor) -> Tensor:
    rows = x.repeat(200, 1).bfloat16()
    return F.cross_entropy(rows, LABELS.repeat(200)).float() + 0.1 * rows.abs().mean().float()


def of_last_times(x: Tensor) -> Tensor:
    """All of its targets are ignored, and a row of another order is taken."""
    times = torch.stack([x, x])
    return F.cross_entropy(times[-1], torch.full((6,), -100), reduction="sum")


MEETING: dict[str, Callable[[Tensor], Any]] = {
    "pairs": lambda x: (x[::2] - x[1::2]).square().mean(),
    "halves": lambda x: (x[:3] * x[3:]).sum(-1).mean(),
    "sums of halves": lambda x: (x[:3] * x[3:]).sum(),
    "chunks": lambda x: F.mse_loss(*x.chunk(2)),
    "thirds": lambda x: F.triplet_margin_loss(x[:2], x[2:4], x[4:]),
    "rotated by hand": lambda x: (x * torch.cat([x[1:], x[:1]])).mean(),
    "one after the other": lambda x: sum((x[i] - x[i + 1]).square().mean() for i in (0, 2, 4)) / 3,
    "the hardest by order": lambda x: each(x)[each(x).argsort(descending=True)[:2]].mean(),
    "those above the mean": lambda x: each(x)[each(x) > each(x).mean()].mean(),
    "a power of a mean": lambda x: F.cross_entropy(x, LABELS) ** 2,
}
BY_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "the first": lambda x: F.cross_entropy(x[0], LABELS[0]),
    "the first row": lambda x: F.cross_entropy(x[:1], LABELS[:1]),
    "the last, made fp32": lambda x: F.cross_entropy(x[-1].float(), LABELS[-1]),
    "a half": lambda x: x[:3].square().mean(),
    "every second": lambda x: x[::2].square().mean(),
}
WEIGHED: dict[str, Callable[[Tensor], Any]] = {
    "by a range": lambda x: (torch.arange(len(x)) * each(x)).mean(),
    "by a range over its sum": lambda x: (
        ((w := torch.arange(1.0, len(x) + 1)) * each(x)).sum() / w.sum()
    ),
    "by a line": lambda x: (torch.linspace(0.5, 1, len(x)) * each(x)).sum(),
    "by a range of Python's": lambda x: (torch.tensor(range(len(x))) * each(x)).mean(),
    "by a count": lambda x: (each(x) / torch.ones(len(x)).cumsum(0)).mean(),
    "by the places of its rows": lambda x: (torch.ones_like(x).cumsum(0) * x).square().mean(),
    "by a column": lambda x: (torch.arange(len(x))[:, None] * x).square().mean(),
    "by a matrix": lambda x: (torch.eye(len(x))[0] * each(x) + each(x)).mean(),
    "by powers": lambda x: (0.9 ** torch.arange(len(x)) * each(x)).mean(),
    "with rows taken": lambda x: (
        (rows := torch.arange(len(x))) * x.log_softmax(-1)[rows, LABELS.clamp(0)]
    ).mean(),
}
ALONE: dict[str, Callable[[Tensor], Any]] = {
    "a mean": lambda x: F.cross_entropy(x, LABELS),
    "a sum": lambda x: F.cross_entropy(x, LABELS, reduction="sum"),
    "a mean of what is sure": lambda x: (each(x) * is_sure(x)).sum() / is_sure(x).sum(),
    "targets made of what is sure": lambda x: F.cross_entropy(
        x, torch.where(is_sure(x), x.argmax(-1), -100)
    ),
    "one by one": lambda x: sum(F.cross_entropy(x[i], LABELS[i]) for i in (0, 2, 3, 5)) / 4,
    "those with targets": lambda x: sum(
        F.cross_entropy(x[i], LABELS[i]) for i in range(6) if LABELS[i] >= 0
    ),
    "in another order": lambda x: each(x)[each(x).argsort()].mean(),
    "with dropout": lambda x: F.cross_entropy(F.dropout(x, 0.5), LABELS),
    "with noise": lambda x: F.mse_loss(x, torch.randn_like(x)),
    "changed in place": changed_in_place,
    "rounded before the end": in_bfloat16,
    "of nothing": of_last_times,
    "at places of each": lambda x: x[torch.arange(len(x)), LABELS.clamp(0)].mean(),
    "by its own weights": lambda x: (torch.arange(6.0)[LABELS.clamp(0)] * each(x)).mean(),
    "by columns": lambda x: (torch.arange(4) * x).square().mean(),
    "with a mask": lambda x: (x * (torch.arange(4)[None] < LABELS[:, None])).square().mean(),
    "by a list of weights": lambda x: (torch.tensor([3, 1, 2, 5, 4, 6]) * each(x)).mean(),
    "by a table and a list": lambda x: (torch.eye(4)[[0, 2, 1, 3, 1, 0]] * x).square().mean(),
    "by lengths of a list": lambda x: (
        torch.stack([torch.arange(4) < n for n in (1, 3, 2, 4, 4, 1)]) * x
    ).sum(),
    "by a mask that is written": lambda x: (masked(LABELS) * each(x)).mean(),
    "by equal weights": lambda x: (torch.ones(len(x)) * each(x)).mean(),
    "drawn by trial": lambda x: x.mean() + torch.poisson(x.square()).mean(),
    "by torch.func": lambda x: torch.vmap(F.cross_entropy)(x, LABELS.clamp(0)).mean(),
    "with sparse tensors": lambda x: (ADJACENT @ x.T).square().mean(),
    "by a divisor": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1)) / 3 + 1.0,
    "what can't be called again": lambda x: F.batch_norm(x, None, None, training=True)[0, 0],
}


@pytest.mark.parametrize("name", MEETING)
def test_samples_that_meet_are_found(name: str) -> None:
    assert finds_meeting(MEETING[name])


@pytest.mark.parametrize("name", BY_PLACE)
def test_samples_that_are_left_out_by_their_places_are_found(name: str) -> None:
    assert finds_meeting(BY_PLACE[name])


@pytest.mark.parametrize("name", WEIGHED)
def test_samples_that_are_weighed_by_their_places_are_found(name: str) -> None:
    assert finds_meeting(WEIGHED[name])


def test_weights_by_place_that_were_made_before_the_layers_are_found() -> None:
    made: dict[Callable[[], Tensor], bool] = {
        lambda: torch.arange(1.0, 7): True,
        lambda: torch.linspace(0.5, 1, 6).square(): True,
        lambda: torch.ones(6): False,
        lambda: torch.arange(1.0, 5): False,
    }
    for make, weighs in made.items():
        watch = LossWatch([], 6, LossTrial(None, 6, is_cut=True))
        watch.resume()
        weights = make()
        x = torch.randn(6, 4, requires_grad=True)
        watch.leave_layers(x)
        loss = ((x * weights).T if len(weights) == 4 else weights * each(x @ WEIGHT)).mean()
        watch.end()
        assert watch.finds_meeting(loss, watch.reductions.of(loss)) is weighs


def test_places_along_sequences_are_let_be() -> None:
    losses: dict[Callable[[Tensor], Any], bool] = {
        lambda x: (torch.arange(x.shape[1])[:, None] * x).square().mean(): False,
        lambda x: (x @ x.mT + torch.ones(5, 5).triu(1) * -9).softmax(-1).square().mean(): False,
        lambda x: x[torch.arange(len(x)), 0].square().mean(): False,
        lambda x: (torch.arange(1.0, len(x) + 1) * x.square().mean((1, 2))).mean(): True,
        lambda x: (torch.tensor(range(len(x))) * x.square().mean((1, 2))).mean(): True,
    }
    for make, weighs in losses.items():
        for num_samples in (1, 3):
            shape = (num_samples, 5, 4)
            assert finds_meeting(make, shape, num_samples, is_cut=True) is weighs
        if not weighs:
            assert not finds_meeting(make, (5, 5, 4), 5), "as many samples as places"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ALONE)
def test_losses_of_samples_by_themselves_are_let_be(name: str) -> None:
    assert not finds_meeting(ALONE[name])


@pytest.mark.filterwarnings("ignore")
def test_compiled_losses_are_let_be() -> None:
    compiled = torch.compile(
        lambda x: F.cross_entropy(x, LABELS) * 2, backend="eager", fullgraph=True
    )
    assert not finds_meeting(compiled)


def test_what_a_trial_has_no_memory_for_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> bool:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Recording, "double", fails)
    assert not finds_meeting(lambda x: x.square().mean(), (1, 5, 4), 1)


def test_samples_are_found_wherever_shapes_allow_them() -> None:
    def pools(x: Tensor) -> Tensor:
        return x.mean(0).square().mean()

    assert not finds_meeting(pools, (5, 6, 4))
    assert finds_meeting(pools, (6, 5, 4))
    assert not finds_meeting(pools, (6, 6, 4)), "dim 0 may be time"
    windows = lambda x: x.unflatten(0, (6, 2)).mean(1).square().mean()  # noqa: E731
    assert not finds_meeting(windows, (12, 4))
    assert finds_meeting(lambda x: (x[:1] * x[1:]).mean(), (12, 4))


def test_one_sample_is_tried_as_two() -> None:
    ids = torch.tensor([[1, 2, 3, 0, 1]])
    losses: dict[Callable[[Tensor], Any], bool] = {
        lambda x: F.cross_entropy(x.view(-1, 4), ids.view(-1)): False,
        lambda x: x.reshape(len(x), -1).norm(dim=1).mean(): False,
        lambda x: x.expand(1, 5, 4).mean(1).square().sum(): False,
        lambda x: x.squeeze(0).softmax(0).square().mean(): False,
        lambda x: x[0][5:].sum() + x.square().mean(): False,
        lambda x: (x[:, None] - x[None]).abs().mean(): True,
        lambda x: (x * torch.cat([x[1:], x[:1]])).mean(): True,
        lambda x: (x[::2].mean(1) - x[1::2].mean(1)).square().mean(): True,
        lambda x: (y := x.mean((1, 2)))[y.argsort()[: max(len(y) // 2, 1)]].mean(): True,
        lambda x: (x[: len(x) // 2] - x[len(x) // 2 :]).square().mean(): True,
    }
    for make, meets in losses.items():
        assert finds_meeting(make, (1, 5, 4), 1) is meets


def test_the_largest_and_the_smallest_of_few_samples_are_found_whichever_they_are() -> None:
    chosen: list[Callable[[Tensor], Any]] = [
        lambda x: x.square().mean((1, 2)).max(),
        lambda x: x.square().mean((1, 2)).min(),
        lambda x: x.mean((1, 2)).max(),
        lambda x: x.mean((1, 2)).min(),
        lambda x: (y := x.mean((1, 2)))[y.argsort()[: max(len(y) // 2, 1)]].mean(),
        lambda x: F.relu(x.mean((1, 2)).sum()),
    ]
    for num_samples in (1, 2):
        for choose in chosen:
            for seed in range(8):
                weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))

                def make(x: Tensor, choose: Any = choose, weight: Tensor = weight) -> Any:
                    return choose(x @ weight)

                assert finds_meeting(make, (num_samples, 5, 4), num_samples)


def test_the_first_of_several_samples_is_found_where_each_is_alone() -> None:
    losses: dict[Callable[[Tensor], Any], bool] = {
        lambda x: F.cross_entropy(x[0], torch.arange(4)[:, None].expand(4, 5)[0] * 0): True,
        lambda x: x.square().mean((1, 2))[0]: True,
        lambda x: x[:1, 2].square().mean(): True,
        lambda x: x[-1].square().mean(): True,
        lambda x: sum(x[i].square().mean() for i in range(len(x))) / len(x): False,
        lambda x: torch.stack([row.square().mean() for row in x]).mean(): False,
        lambda x: x[:, 0].square().mean(): False,
        lambda x: x[: len(x)].square().mean(): False,
        lambda x: torch.stack([x.square().mean(), x.abs().mean()])[0]: False,
        lambda x: x.transpose(0, 1)[0].square().mean(): False,
        lambda x: (x[0].square().mean() + x.square().mean()) / 2: False,
    }
    for make, is_left_out in losses.items():
        assert finds_meeting(make, (1, 5, 4), 1, is_cut=True) is is_left_out
        assert not finds_meeting(make, (1, 5, 4), 1)


def test_packed_samples_meet_only_beyond_their_ends() -> None:
    class Packed:
        cu_seqlens = torch.tensor([0, 2, 6], dtype=torch.int32)

    def meets(make: Callable[[Tensor], Any]) -> bool:
        watch = LossWatch([], 2, LossTrial(Packed(), 2))
        x = torch.randn(6, 4)
        watch.leave_layers(x)
        loss = make(x)
        watch.end()
        return watch.finds_meeting(loss, None)

    assert not meets(lambda x: x[:2].mean().square() + x[2:].mean().square())
    assert meets(lambda x: x[:3].mean().square() + x[3:].mean().square())


def test_a_loss_is_tried_until_an_iteration_has_ended_with_it_and_now_and_then() -> None:
    trials = LossTrials()
    assert [trials.begin(index) for index in range(3)] == [True, False, False]
    assert trials.begin(99)
    assert not trials.begin(100)
    later = LossTrials()
    later.is_known = trials.is_known  # As of a generation before.
    assert not later.begin(7)
    assert later.begin(0), "with each epoch's first batch again"
    # One that was cut short has shown nothing.
    cut = LossTrials()
    assert cut.begin(5)
    assert not cut.is_known
