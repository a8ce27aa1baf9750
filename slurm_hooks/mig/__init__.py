"""Changes of MIG layouts on drained nodes, one recorded step after another, and larger slices for pending jobs."""

__all__ = ("layouts", "planning", "raise_plan", "run", "sides", "steps")
