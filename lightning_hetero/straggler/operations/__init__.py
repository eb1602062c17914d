"""Operation traces: what each rank did when, replayed, and what would have been faster."""
