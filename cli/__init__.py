"""The click commands: parse, call, print. The only place that exits or prints."""

__all__ = ("app", "main", "output", "tasks")
