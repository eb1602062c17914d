"""Set-up before the first iteration: detect devices and layers, measure, cut into slices."""
