"""Attribute GPUs to jobs, by time."""

__all__ = ("allocations", "runs", "seen_units")
