"""Nodes of a node set over time: demand, use, waits, and counts."""
