"""Dispatch, packing, proposal and whole assignment on real lengths at 64 and 1,024 GPUs.

Floors, from counting operations. Dispatch: B steps of about 12 NumPy calls on [100, D] arrays, at
64 GPUs 60·12 calls of 2 µs = 1.5 ms, at 1,024 900 steps on [100, 130] = 0.1 s, and the improvement
steps on top. Packing: one matrix product per group of equal size, under 1 ms, and at 1,024 the
Python work of some hundred pipelines, 10 ms. Proposal: (plans tried)·(iterations)·(sequences)
steps, 1,024 GPUs: 200·12·900 = 2.2 M greedy steps of 1 µs.

Peers know neither pipelines nor unequal devices: verl's Karmarkar-Karp over tokens, best-fit and
first-fit decreasing into bins of the context length, dealt evenly. Each gets the homogeneous plan
that is best for it of all that hold the context. Clusters: half of the GPUs at half the speed, as
this package is for; and all equal. There one 32K sequence alone takes at least 2.94 s of any plan,
and the peer's best plan is made for it, so that little can be gained where many iterations have
one: each row says which ratio no plan and assignment can exceed, by a bound over all of them.
"""

import time

import numpy as np

from lightning_hetero.assign import assign_iteration, dispatch
from lightning_hetero.assign.iteration import pack_dispatch
from lightning_hetero.assign.pipeline_cost import PipelineCost
from lightning_hetero.planner.proposing.proposal import propose
from tests.assign.exact import dispatch_exact, fine_bound_s
from tests.benchmarks.assignment_cases import (
    LENGTH_SETS,
    assign_by_karmarkar_karp,
    best_fit_decreasing,
    bins_of,
    check_work,
    draw_iterations,
    first_fit_decreasing,
    homogeneous_plans,
    load_lengths,
    most_possible,
    pipeline_times_s,
    schemes_on,
)
from tests.benchmarks.harness import Row, median_times_s

CONTEXT = 32_768
SIZES = {64: (200_000, 30), 1024: (3_200_000, 4)}
CLUSTERS = {"mixed": {"A800": 1.0, "half-speed": 0.5}, "equal": {"A800": 1.0}}
PEERS = {
    "verl Karmarkar-Karp": assign_by_karmarkar_karp,
    "TRL best-fit decreasing": bins_of(best_fit_decreasing, CONTEXT),
    "first-fit decreasing": bins_of(first_fit_decreasing, CONTEXT),
}


class Case:
    """One cluster, length set and size, with its iterations and proposed plans."""

    def __init__(self, num_gpus: int, cluster: str, length_set: str) -> None:
        self.num_gpus = num_gpus
        self.title = f"{num_gpus} GPUs {cluster}, {length_set}"
        tokens, count = SIZES[num_gpus]
        speeds = CLUSTERS[cluster]
        self.devices = {device: num_gpus // len(speeds) for device in speeds}
        lengths = load_lengths(length_set, CONTEXT)
        self.schemes = schemes_on(num_gpus, speeds)
        schemes = list(self.schemes.values())
        start = time.perf_counter()
        proposals = propose(lengths, schemes, self.devices, tokens_per_iteration=tokens)
        self.proposal_s = time.perf_counter() - start
        self.candidates = [list(proposal.pipelines(schemes)) for proposal in proposals]
        self.iterations = draw_iterations(lengths, tokens, count)
        self.chosen = [assign_iteration(item, self.candidates) for item in self.iterations]
        self.plans = [self.candidates[item.plan_index] for item in self.chosen]

    def row(self, what: str, value: float, target: float, unit: str, note: str = "") -> Row:
        """Return a row with an absolute bound; seconds are measured, gaps are not."""
        return Row(
            name=f"{what}: {self.title}",
            ours=value,
            peer=None,
            unit=unit,
            target=target,
            better="lower",
            kind="measured" if unit == "s" else "simulated",
            value=value,
            note=note,
        )

    def timings(self) -> list[Row]:
        """Return the times of proposal, dispatch and packing."""
        pairs = list(zip(self.iterations, self.plans, strict=True))[:6]
        found = [dispatch(lengths, plan) for lengths, plan in pairs]
        dispatch_s, pack_s = (
            seconds / len(pairs)
            for seconds in median_times_s(
                lambda: [dispatch(lengths, plan) for lengths, plan in pairs],
                lambda: [
                    pack_dispatch(lengths, done, plan)
                    for (lengths, plan), done in zip(pairs, found, strict=True)
                ],
                repeats=5,
            )
        )
        small = self.num_gpus == 64
        note = f"{len(pairs[0][0])} sequences, {len(pairs[0][1])} pipelines, per iteration"
        return [
            self.row("dispatch", dispatch_s, 0.03 if small else 0.5, "s", note),
            self.row("packing, all pipelines", pack_s, 0.05 if small else 0.5, "s", note),
            self.row("proposal", self.proposal_s, 2.0 if small else 20.0, "s"),
        ]

    def gaps(self) -> list[Row]:
        """Return how far dispatches and packings are from lower bounds, on average."""
        dispatch_gaps, packing_gaps = [], []
        for lengths, plan in zip(self.iterations, self.plans, strict=True):
            found = dispatch(lengths, plan)
            bound_s = found.lower_bound_s
            if self.num_gpus == 64 and found.latency_s > bound_s * 1.002:
                bound_s = fine_bound_s(lengths, plan, found.latency_s)
            packings = pack_dispatch(lengths, found, plan)
            dispatch_gaps.append(found.latency_s / bound_s)
            packing_gaps.append(
                max(p.latency_s for p in packings) / max(p.lower_bound_s for p in packings)
            )
        return [
            self.row("dispatch / lower bound, mean", float(np.mean(dispatch_gaps)), 1.01, "ratio"),
            self.row("packing / lower bound, mean", float(np.mean(packing_gaps)), 1.01, "ratio"),
        ]

    def against_peers(self) -> Row:
        """Return our simulated iteration time against the best peer's."""
        ours_s = []
        for lengths, plan, chosen in zip(self.iterations, self.plans, self.chosen, strict=True):
            check_work(lengths, plan, chosen.microbatches)
            ours_s.append(max(pipeline_times_s(lengths, plan, chosen.microbatches)))
        times_s: dict[str, float] = {}
        for plan_name, plan in homogeneous_plans(self.schemes, self.devices, CONTEXT).items():
            for peer, assign in PEERS.items():
                ends_s = []
                for lengths in self.iterations:
                    work = assign(lengths, plan)
                    check_work(lengths, plan, work)
                    ends_s.append(max(pipeline_times_s(lengths, plan, work)))
                times_s[f"{peer} on {plan_name}"] = float(np.mean(ends_s))
        best = min(times_s, key=times_s.__getitem__)
        mean_s = float(np.mean(ours_s))
        limit = most_possible(times_s[best], self.iterations, ours_s, self.schemes, self.devices)
        return Row(
            name=f"assignment against the best peer: {self.title}",
            ours=mean_s,
            peer=times_s[best],
            unit="s/iteration",
            target=1.15,
            better="higher",
            kind="simulated",
            value=times_s[best] / mean_s,
            note=f"peer: {best}; {limit}",
        )


def exact_row(case: Case) -> Row:
    """Return our dispatch against HiGHS' with ten seconds, on iterations with a gap."""
    gaps = []
    for lengths, plan in zip(case.iterations, case.plans, strict=True):
        found = dispatch(lengths, plan)
        if found.latency_s > found.lower_bound_s * 1.002 and len(gaps) < 2:
            exact = dispatch_exact(lengths, plan, time_limit_s=10.0)
            gaps.append((found.latency_s, exact.latency_s))
    ours_s, exact_s = (float(np.mean(column)) for column in zip(*gaps, strict=True))
    return Row(
        name=f"dispatch against exact dispatch: {case.title}",
        ours=ours_s,
        peer=exact_s,
        unit="s/iteration",
        target=1.01,
        better="lower",
        kind="simulated",
        value=ours_s / exact_s,
        note="peer: HiGHS, 10 s an iteration, on two iterations with a gap to the fast bound",
    )


def run() -> list[Row]:
    """Return times, gaps and ratios of every case."""
    rows = []
    for cluster in CLUSTERS:
        for num_gpus in SIZES:
            for length_set in LENGTH_SETS:
                case = Case(num_gpus, cluster, length_set)
                rows += [*case.timings(), *case.gaps(), case.against_peers()]
                if (cluster, num_gpus, length_set) == ("equal", 64, "web-documents"):
                    rows.append(exact_row(case))
    return [*rows, very_many_row()]


def very_many_row() -> Row:
    """Return the processor seconds of dispatching 100,000 sequences on 1,024 pipelines."""
    lengths = np.exp(np.random.default_rng(0).normal(6.5, 1.1, 100_000)).astype(int)
    kinds = [
        PipelineCost(
            a=slower * 1.6e-10, b=slower * 1e-5, c=8e-3, max_len=most, util_len=2048, num_stages=pp
        )
        for slower, most, pp in ((1.0, 32_768, 2), (2.0, 16_384, 4), (4.0, 8_192, 1))
    ]
    start = time.process_time()
    found = dispatch(lengths.clip(1, 32_000), [kinds[index % 3] for index in range(1024)])
    seconds = time.process_time() - start
    return Row(
        name="dispatch of 100,000 sequences on 1,024 pipelines, processor time",
        ours=seconds,
        peer=None,
        unit="s",
        target=1.0,
        better="lower",
        kind="measured",
        value=seconds,
        note=f"within {found.latency_s / found.lower_bound_s - 1:.1%} of the bound",
    )
