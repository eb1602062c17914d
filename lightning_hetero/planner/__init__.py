"""Decide which device runs which layers (AutoHet §III), by column generation.

Devices of a type on equal nodes are interchangeable, so a pipeline is described by its composition:
stages in order, each with a class of nodes, a TP degree and layers. It is a *column*. With
bottleneck t and fill f it finishes (T - f)/t micro-batches by T.

The *master* (`master`) chooses how often each column runs. For D pipelines and M micro-batches it
finds the least T at which::

    maximise    Σ_p x_p·(T - f_p)/t_p
    subject to  Σ_p x_p·devices_p ≤ devices of each class, and the same for groups of each degree,
                Σ_p x_p ≤ D,
                Σ_p x_p·room_p ≥ all states          where owners follow the room on devices

reaches M, by Newton steps on T; HiGHS solves the programme, first with fractions, then with whole
numbers. *Pricing* (`pricing`) finds the columns: for dual prices π of devices, μ of a pipeline and
ρ of room the best pipeline of a bottleneck t minimises::

    Σ_stages (w/t + π·devices - ρ·room),    w ≤ t,

a shortest path over (stages from the end, layers placed). A stage's position from the end says how
many micro-batches it holds, hence its memory and the least recomputation that fits (`stages`). The
seconds of pulls, pushes and steps depend on D, so there is a master for each D worth trying, and
for each of two orders of placement: what stays on a node decides how slow links count (`columns`).
Pipelines of few micro-batches have other layers than balanced ones (`splitting`).

Whole mixes are placed on nodes (`placement`), micro-batches are dealt to them (`pace`), memory
is settled (`memory`, `hosts`), and the simulator judges (`judge`). One local search improves the
best plans (`improve`): a layer, a micro-batch, a device, a degree, two places swapped. The plan
that runs, `plan(start=...)`, is among those that are judged, so no worse plan is returned. `bound`
prices a master without links and exchange to optimality: no plan is faster.

Read in this order: `workload`, `stages`, `columns`, `pricing`, `splitting`, `master`, `placement`,
`pace`, `memory`, `judge`, `neighbourhood`, `improve`, `fastest`, `bound`, `search`. `proposing`
uses the same columns for samples of varied lengths (Hydraulis §7).
"""

from lightning_hetero.planner.proposing.candidate_plans import (
    CandidateOptions,
    CandidatePlans,
    propose_plans,
)
from lightning_hetero.planner.proposing.pipeline_costs import plan_costs
from lightning_hetero.planner.result import PlannedCandidate, PlanningResult
from lightning_hetero.planner.search import plan, plan_best_size
from lightning_hetero.planner.workload import Objective, PlanningOptions, Workload

__all__ = [
    "CandidateOptions",
    "CandidatePlans",
    "Objective",
    "PlannedCandidate",
    "PlanningOptions",
    "PlanningResult",
    "Workload",
    "plan",
    "plan_best_size",
    "plan_costs",
    "propose_plans",
]
