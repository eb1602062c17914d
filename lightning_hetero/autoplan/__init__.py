"""Make a plan for the ranks that run: gather what they are, measure what is unknown, search."""

from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned

__all__ = ["AutoPlan", "AutoPlanned"]
