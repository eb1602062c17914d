"""Parts of `LayerwiseCheckpoint`: what a rank owns, where it is kept, and whether it is sound."""
