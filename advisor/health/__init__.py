"""Failures of nodes: rates, nodes that fail far more jobs than others, and checkpoints."""

__all__ = ("checkpoints", "nodes", "record")
