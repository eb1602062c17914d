"""A process's identity, its cached files, and helper processes that answer questions."""
