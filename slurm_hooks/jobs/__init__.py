"""The engine that changes jobs, and its record."""

__all__ = ("engine", "log")
