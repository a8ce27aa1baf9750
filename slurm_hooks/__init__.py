"""Everything that Slurm calls, or that calls Slurm to act."""

__all__ = ("distribute", "orders", "root_files")
