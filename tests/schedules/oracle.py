"""The shortest schedule of a tiny pipeline, solved exactly by HiGHS."""

import itertools
from typing import Any

import highspy

from lightning_hetero.schedules import ScheduleProblem


def shortest_s(problem: ScheduleProblem) -> float:
    """Return the least seconds of any schedule: one binary for each two passes of a worker.

    A pass begins at x[kind, stage, micro-batch]; y[a, b] says that a runs before b. Bytes are
    counted where an F begins: what earlier passes keep, and its own.
    """
    seconds = problem.forward_s, problem.input_s, problem.weight_s
    num_stages, count = problem.num_stages, problem.num_microbatches
    longest = sum(sum(map(sum, rows)) for rows in seconds) + count * sum(
        edge.latency_s + edge.transfer_s for edge in problem.forward_edges + problem.backward_edges
    )
    model = highspy.Highs()
    model.silent()
    end = model.addVariable(0, longest)
    keys = [*itertools.product(range(3), range(num_stages), range(count))]
    begin = {key: model.addVariable(0, longest) for key in keys}

    def seconds_of(key: tuple[int, int, int]) -> float:
        kind, stage, microbatch = key
        return seconds[kind][stage][microbatch]

    for kind, stage, m in keys:
        model.addConstr(begin[kind, stage, m] + seconds_of((kind, stage, m)) <= end)
        if m:
            before = begin[kind, stage, m - 1] + seconds_of((kind, stage, m - 1))
            model.addConstr(begin[kind, stage, m] >= before)
        if kind:
            before = begin[kind - 1, stage, m] + seconds_of((kind - 1, stage, m))
            model.addConstr(begin[kind, stage, m] >= before)
    for stage, (there, back) in enumerate(
        zip(problem.forward_edges, problem.backward_edges, strict=True)
    ):
        for kind, source, target, edge in (
            (0, stage, stage + 1, there),
            (1, stage + 1, stage, back),
        ):
            sent: Any = None
            for m in range(count):
                done = model.addVariable(0, longest)
                own = begin[kind, source, m] + seconds_of((kind, source, m))
                model.addConstr(done >= own + edge.transfer_s)
                if sent is not None:
                    model.addConstr(done >= sent + edge.transfer_s)
                model.addConstr(begin[kind, target, m] >= done + edge.latency_s)
                sent = done
    for worker in range(problem.num_workers):
        own_keys = [key for key in keys if problem.workers[key[1]] == worker]
        _one_at_a_time(model, problem, own_keys, begin, longest)
    model.minimize(end)
    return float(model.getInfo().objective_function_value)


def _one_at_a_time(
    model: Any, problem: ScheduleProblem, keys: list[Any], begin: Any, longest: float
) -> None:
    seconds = problem.forward_s, problem.input_s, problem.weight_s
    worker = problem.workers[keys[0][1]]
    is_before: dict[Any, Any] = {}
    for a, b in itertools.combinations(keys, 2):
        if a[:2] == b[:2]:
            is_before[a, b], is_before[b, a] = (1, 0) if a[2] < b[2] else (0, 1)
            continue
        y = model.addBinary()
        is_before[a, b], is_before[b, a] = y, 1 - y
        model.addConstr(begin[b] >= begin[a] + seconds[a[0]][a[1]][a[2]] - longest * (1 - y))
        model.addConstr(begin[a] >= begin[b] + seconds[b[0]][b[1]][b[2]] - longest * y)
    for own in (key for key in keys if key[0] == 0):
        used: Any = problem.held_bytes[own[1]][own[2]]
        for other in keys:
            kind, stage, m = other
            held, waiting = problem.held_bytes[stage][m], problem.waiting_bytes[stage][m]
            added = (held, waiting - held, -waiting)[kind]
            if other != own and added:
                used = used + added * is_before[other, own]
        if not isinstance(used, float):
            model.addConstr(used <= problem.room_bytes[worker] * (1 + 1e-9))
