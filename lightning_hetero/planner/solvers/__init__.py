"""Programmes that the search starts from: groups of devices, layers of stages, rates."""
