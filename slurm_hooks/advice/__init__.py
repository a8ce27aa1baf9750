"""Advice for submissions: made from the store, published for users and for Slurm, and shown without the store."""

__all__ = ("file", "kinds", "publication_log", "publish", "sched", "shown", "type_files")
