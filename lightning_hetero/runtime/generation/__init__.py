"""Runs whose ranks come and go: who is in them, and who starts their processes."""
