"""How long a layout takes, and whether it fits, without simulating it: pipelines, then plans."""
