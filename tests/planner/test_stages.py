"""Stages as arrays have the seconds and bytes of the cost model."""

import numpy as np
import pytest

from lightning_hetero.core.cluster import Cluster, Node
from lightning_hetero.core.model_spec import ModelSpec
from lightning_hetero.planner.stages import ENDS, Ownership, Stages
from lightning_hetero.planner.workload import Workload
from lightning_hetero.simulator import RooflineCost, StateLayout

CLUSTER = Cluster(nodes=(Node(device="A100-40GB", count=4), Node(device="V100-16GB", count=2)))
LAYOUTS = [StateLayout(), StateLayout(host_owned=True), StateLayout.replicated()]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt-neo-2.7b", "llama-13b"])
def test_stages_take_the_least_recomputation_that_the_cost_model_has_memory_for(name, layout):
    cost = RooflineCost(CLUSTER, ModelSpec.load(name), layout=layout)
    work = Workload(sequence_length=2048, global_batch_size=16)
    stages, number = Stages(cost, work, (1, 2, 4)), 2
    choose = np.random.default_rng(0)
    for by_room in (False, True) if layout.is_owned_by_room else (False,):
        table = stages.table(Ownership(number, by_room))
        for _ in range(200):
            end, option = int(choose.integers(4)), int(choose.integers(len(stages.options)))
            place = 0 if end % 2 else int(choose.integers(stages.max_stages))
            count = int(choose.integers(1, stages.num_layers + 1))
            index = end, option, place, count
            known, levels = stages.arrays.at(index), np.arange(stages.arrays.most[index] + 1)
            first, last = ENDS[end]
            bare = stages.shape(stages.options[option], count, first=first, last=last)
            held = min(place + 1, work.num_microbatches) * stages.tokens
            fits, seconds = [], []
            for whole, some in zip(*known.recomputed(levels), strict=True):
                shape = bare._replace(recomputed_layers=int(whole), selective_layers=int(some))
                owned = 0.0 if by_room else None
                memory = cost.memory_of_tokens(
                    shape, number, held, stages.tokens, owned_params=owned
                )
                fits.append(memory.total <= cost.usable_bytes(shape.device))
                seconds.append(sum(cost.compute_s(shape, work.microbatch)))
            assert known.seconds_at(levels) == pytest.approx(np.array(seconds))
            level = int(table.levels[index])
            assert level == (fits.index(True) if any(fits) else -1)
            if level >= 0:
                assert table.total_s[index] == pytest.approx(seconds[level])


def test_a_rank_owns_what_it_has_room_for_and_no_more():
    cost = RooflineCost(CLUSTER, ModelSpec.load("gpt-neo-2.7b"))
    stages = Stages(cost, Workload(sequence_length=2048, global_batch_size=16), (1, 2))
    for number in (2, 5):
        room = stages.table(Ownership(number, by_room=True)).room
        for index, option in enumerate(stages.options):
            shape = stages.shape(option, 4, first=False, last=False)
            owned = float(room[0, index, 1, 4]) / option.tp_degree
            totals = [
                cost.memory_of_tokens(
                    shape, number, 2 * stages.tokens, stages.tokens, owned_params=owned * factor
                ).total
                for factor in (1.0, 1.001)
            ]
            assert totals[0] <= cost.usable_bytes(shape.device) < totals[1]
