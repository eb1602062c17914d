"""A stage on several ranks that each hold a part of its matrices."""
