"""Facts of a process, files it keeps, and processes that answer it."""
