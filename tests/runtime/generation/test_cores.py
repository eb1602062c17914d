import os
from collections.abc import Iterator

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_hetero.runtime.generation import entering as cores
from lightning_hetero.runtime.generation.entering import GenerationEnvironment, share_cores
from lightning_hetero.runtime.generation.records import Generation, Member


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    kept = {name: os.environ.pop(name, None) for name in (cores._NUM_THREADS, cores._SHARED)}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    torch.set_num_threads(8)
    yield
    for name, value in kept.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    torch.set_num_threads(before)


@pytest.mark.usefixtures("eight_cores")
def test_a_process_gives_up_cores_that_others_need_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for num_processes, num_threads in ((1, 8), (4, 2), (1, 2)):  # It takes none back.
        share_cores(num_processes)
        assert torch.get_num_threads() == num_threads
    assert os.environ["OMP_NUM_THREADS"] == "2"
    monkeypatch.delenv(cores._SHARED)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    torch.set_num_threads(5)
    share_cores(4)
    assert torch.get_num_threads() == 5


@pytest.mark.usefixtures("eight_cores")
def test_ranks_give_cores_up_in_each_generation_to_others_of_their_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    share_cores(1)
    environment = LightningEnvironment()
    for nodes, expected in (("ab", 8), ("aba", 4), ("abaa", 2)):
        members = tuple(Member(number, node) for number, node in enumerate(nodes))
        generation = Generation(number=len(nodes), members=members)
        environment = GenerationEnvironment(environment, generation, 0)
        assert torch.get_num_threads() == expected
