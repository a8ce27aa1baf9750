"""The engine that orders nodes: the record first, then a last look at Slurm, then the order."""

__all__ = ("engine",)
