"""Tensor parallelism: a stage on several ranks, each of which holds a part of its matrices."""
