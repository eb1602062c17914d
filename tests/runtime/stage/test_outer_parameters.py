"""Only what is used of a parameter counts, not what is thrown away."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_hetero.runtime.stage.outer_parameters import ReadWatch
from tests.capped_memory import MemoryCounter

IDS = torch.tensor([0, 2, 1])


def reads(
    use: Callable[[ReadWatch, Tensor, Tensor], object], *, is_first: bool = False
) -> set[str]:
    table, head = torch.randn(4, 3, requires_grad=True), torch.randn(3, 4)
    found: set[str] = set()
    watch = ReadWatch({"table": table, "head": head}, found, is_first=is_first)
    with watch:
        use(watch, table, head)
    return found


def behind(watch: ReadWatch, value: Tensor) -> Tensor:
    watch.uses_all = True
    return value + 1


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda watch, table, head: F.embedding(IDS, table) * 2, set()),
        (lambda watch, table, head: table.detach()[IDS].mean(-1) > 0, set()),
        (lambda watch, table, head: table.shape, set()),
        (lambda watch, table, head: behind(watch, F.embedding(IDS, table)), {"table"}),
        (lambda watch, table, head: behind(watch, table.detach().view(-1)[3:]), {"table"}),
        (lambda watch, table, head: behind(watch, table @ head), {"table", "head"}),
        (lambda watch, table, head: (table @ head, behind(watch, head)), {"head"}),
        (lambda watch, table, head: watch.use([F.embedding(IDS, table)]), {"table"}),
        (lambda watch, table, head: table.sum().item(), {"table"}),
        (lambda watch, table, head: bool((head > 0).any()), {"head"}),
        (lambda watch, table, head: head.nonzero(), {"head"}),
        (lambda watch, table, head: torch.ones(3, 4)[head > 0], {"head"}),
        (lambda watch, table, head: torch.zeros(3, 4).copy_(head), {"head"}),
        (lambda watch, table, head: (head * 1).mul_(torch.ones(4)), set()),
    ],
)
def test_a_stage_behind_the_first_uses_what_reaches_its_layers_or_values(
    use: Callable[[ReadWatch, Tensor, Tensor], object], expected: set[str]
) -> None:
    assert reads(use) == expected


def test_the_first_stage_uses_all_that_it_reads() -> None:
    found = reads(lambda watch, table, head: F.embedding(IDS, table), is_first=True)
    assert found == {"table"}


@pytest.mark.parametrize("is_covered", [False, True])
def test_modes_around_a_step_see_what_passes_unwatched(*, is_covered: bool) -> None:
    found: set[str] = set()
    head = torch.randn(3, 4)
    watch = ReadWatch({"head": head}, found, is_first=True)
    inner = MemoryCounter(2**40) if is_covered else nullcontext()
    with MemoryCounter(2**40) as counter, watch, inner:
        before = counter.live_bytes
        with watch.pause():
            made = head + 1
    assert not found
    assert (counter.live_bytes - before == made.nbytes) is not is_covered
