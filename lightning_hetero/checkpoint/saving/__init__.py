"""From a rank's state to whole checkpoints in all tiers."""
