"""The processes of a run: groups, messages, and who has failed."""
