"""What stands for a batch where a rank has no samples."""

__all__ = ["EmptyBatch"]


class EmptyBatch:
    """The batch of a rank without samples in an iteration; it still takes part in it."""

    def __repr__(self) -> str:
        return "EmptyBatch()"
