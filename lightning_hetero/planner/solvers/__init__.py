"""Solvers of the search: compositions of device groups, layers of stages, rates of pipelines."""
