"""Improve plans that are known to fit.

Read in this order: `improver` (which plans, and with how much freedom), `local_search` (how far),
`moves` (what is changed).
"""
