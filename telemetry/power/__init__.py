"""Nodes of a node set over time: demand, use, waits, and counts."""

__all__ = ("demand", "series", "waits")
