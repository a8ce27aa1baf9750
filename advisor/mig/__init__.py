"""MIG slices: legal states of a GPU, the need of jobs for compute, and the layouts to choose."""

__all__ = ("compute_need", "decide", "outlook", "states")
