"""Estimate how long an arrangement takes, and whether it fits, without simulating it."""
