"""Decide which device runs which layers: grouping, mapping, balancing and search (AutoHet §III)."""

from lightning_hetero.planner.grouping import Grouping, effective_power, group_devices

__all__ = ["Grouping", "effective_power", "group_devices"]
