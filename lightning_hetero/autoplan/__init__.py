"""Make a plan for the ranks that run: find their devices, measure unknown ones, search.

Read in this order: `facts` (what is known), `jobs` (what is planned for, now and after losses),
`planning` (requests and their plans), `engine_choices` (owners, standbys, exchange), `summary` (the
report at the start) and `out_of_memory` (what a failure teaches the next start).
"""

from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned

__all__ = ["AutoPlan", "AutoPlanned"]
