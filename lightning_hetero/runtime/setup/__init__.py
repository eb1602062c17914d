"""What happens once, before the first iteration: look, measure, compare, cut into slices."""
