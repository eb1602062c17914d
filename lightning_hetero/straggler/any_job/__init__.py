"""Stragglers of any job, without Lightning and without a plan: what it recorded, or let record."""
