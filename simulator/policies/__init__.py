"""Scheduling policies. A policy orders the queue and may pick nodes; the engine does the rest."""

__all__ = ("base", "packing", "priority")
