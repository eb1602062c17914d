"""Make a plan for the ranks that run: find their devices, measure unknown ones, search."""

from lightning_hetero.autoplan.facts import AutoPlan, AutoPlanned

__all__ = ["AutoPlan", "AutoPlanned"]
