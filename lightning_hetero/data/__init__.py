"""Batches and how they reach the ranks."""
