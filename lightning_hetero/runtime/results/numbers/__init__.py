"""Detect the kind of a step's numbers: means, sums or extremes over samples, or constants."""
