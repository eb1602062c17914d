"""Decide which device runs which layers (AutoHet §III), by column generation.

Devices of a type on equal nodes are interchangeable, so a pipeline is described by its composition:
its stages in order, each with a class of nodes, a TP degree and layers. Such a composition is a
*column* of a linear programme. Its *bottleneck* t is the seconds that each further micro-batch
takes, its *fill* f all other seconds, so it finishes (T - f)/t micro-batches by time T.

The *master* (`master`) chooses how often each column runs, x_p times. For D pipelines and M
micro-batches it finds the least T at which::

    maximise    Σ_p x_p·(T - f_p)/t_p
    subject to  Σ_p x_p·devices_p ≤ devices of each class, and the same for groups of each degree,
                Σ_p x_p ≤ D,
                Σ_p x_p·room_p ≥ all states          where owners follow the room on devices

reaches M, by Newton steps on T. HiGHS solves the programme, first with fractional x_p, then with
whole numbers. *Pricing* (`pricing`) finds the columns: for dual prices π of devices, μ of a
pipeline and ρ of room, the best pipeline of bottleneck t minimises::

    Σ_stages (w/t + π·devices - ρ·room),    w ≤ t,

where w are a stage's seconds. That is a shortest path over (stages from the end, layers placed). A
stage's position from the end decides how many micro-batches it holds at once, hence its memory and
the least recomputation that fits (`stages`). The seconds of pulls, pushes and optimizer steps
depend on D, so there is a master for each D worth trying, and for each of two orders of placement,
because links between nodes are slow (`columns`). Pipelines of few micro-batches need other layers
than balanced ones (`splitting`).

The mixes of columns are then placed on nodes (`placement`), micro-batches are distributed (`pace`),
recomputation and owners are decided (`memory`, `hosts`), and the simulator times the plan
(`judge`). A local search improves the best plans (`improve`) by changing a layer, a micro-batch, a
device or a degree, or by swapping two places. The plan that is running, `plan(start=...)`, is among
those that are judged, so no worse plan is returned. `bound` solves a master without memory, links
and exchange to optimality, which gives a time that no plan can beat.

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
