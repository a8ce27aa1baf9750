"""Packing: how fast jobs of one user run that share a GPU, and what their past runs tell of it."""
