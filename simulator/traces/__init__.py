"""Readers and generators of traces, by subject and format."""

__all__ = ("gavel", "mig", "packing", "read", "swf")
