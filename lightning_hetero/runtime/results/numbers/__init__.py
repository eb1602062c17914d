"""Of which kind the numbers of a step are: means, sums or extremes over samples, or constants."""
