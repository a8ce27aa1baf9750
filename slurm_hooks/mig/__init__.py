"""Changing the layout of MIG slices of drained nodes, one recorded step after another."""
