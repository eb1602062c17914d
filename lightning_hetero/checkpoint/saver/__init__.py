"""From a rank's state to whole checkpoints in all tiers.

In the order of a save: `writer` begins it, `snapshot` copies the state, `commit` lets all ranks
bring it into the tiers together, and `storing` writes and uploads it.
"""
