"""The report on the whole site: its data, its tables, and its page."""

__all__ = ("faults", "packing", "page", "power", "report", "tables", "tasks", "totals", "words")
