"""One stage out of the whole model, and what travels between stages."""
