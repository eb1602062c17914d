"""Optimizers that need whole matrices get them, or are refused."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_hetero.core.errors import ConfigurationError
from lightning_hetero.core.slices import Slice
from lightning_hetero.runtime.slices.whole_tensors import check_optimizers, needs_whole_matrices
from tests.processes import ProcessFailed, ProcessPool
from tests.runtime.runs import Case, pipeline, plan_of, stage, train
from tests.runtime.test_parity import assert_same_training

PLAN = plan_of(
    pipeline(stage(2, 0, 2), stage(0, 2, 3)),
    pipeline(stage(1, 0, 3)),
)
CASE = Case(plan=PLAN, world_size=3, optimizer="muon", batch_size=3, num_rows=24)


class DistributedShampoo(torch.optim.SGD):
    pass


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 4))]


def test_known_optimizers_are_told_apart_by_name() -> None:
    whole = [torch.optim.Muon, torch.optim.Adafactor, DistributedShampoo]
    elementwise = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop]
    assert all(needs_whole_matrices(kind(parameters(), lr=0.1)) for kind in whole)
    assert not any(needs_whole_matrices(kind(parameters(), lr=0.1)) for kind in elementwise)


def test_only_cut_parameters_are_refused() -> None:
    muon, adam = torch.optim.Muon(parameters()), torch.optim.Adam(parameters())
    whole = {"weight": (Slice(1, 0, 4),)}
    cut = {"weight": (Slice(0, 0, 2), Slice(1, 2, 4))}
    check_optimizers([muon, adam], whole)
    check_optimizers([adam], cut)
    with pytest.raises(ConfigurationError, match='ownership="parameter"'):
        check_optimizers([adam, muon], cut)


def test_an_optimizer_of_all_parameters_needs_one_owner_of_all() -> None:
    class Prodigy(torch.optim.SGD):
        """Named as one that is known."""

    prodigy, lbfgs = Prodigy(parameters()), torch.optim.LBFGS(parameters())
    here, there = (Slice(0, 0, 4),), (Slice(1, 0, 4),)
    check_optimizers([prodigy], {"weight": here, "other": here})
    with pytest.raises(ConfigurationError, match="Prodigy computes with all parameters at once"):
        check_optimizers([prodigy], {"weight": here, "other": there})
    with pytest.raises(ConfigurationError, match=r"LBFGS .* evaluates the loss several times"):
        check_optimizers([lbfgs], {"weight": here, "other": here})


@pytest.mark.dist
def test_muon_with_whole_parameters_trains_as_a_single_device_does(pool: ProcessPool) -> None:
    case = replace(CASE, ownership="parameter")
    expected = pool.run_alone(train, case.on_single_device())
    for outcome in pool.run(train, 3, case):
        assert_same_training(outcome, expected)


@pytest.mark.dist
@pytest.mark.parametrize("ownership", ["auto", "even"])
def test_muon_on_slices_is_an_error_that_names_the_option(
    pool: ProcessPool, ownership: str
) -> None:
    case = replace(CASE, ownership=ownership)
    with pytest.raises(ProcessFailed, match=r'Muon needs whole matrices.*ownership="parameter"'):
        pool.run(train, 3, case)
