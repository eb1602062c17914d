"""Losses, logs, metrics and outputs of the user's steps, as one device would have them."""
