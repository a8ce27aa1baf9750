"""MIG: legal states of a GPU, how they are changed, and what jobs need of a slice."""
