"""Once, before the first iteration: look at devices and module, measure, cut into slices."""
