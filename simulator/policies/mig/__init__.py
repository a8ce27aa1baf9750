"""Policies for clusters whose GPUs are cut into MIG slices."""

__all__ = ("comparison", "layouts", "schemes")
