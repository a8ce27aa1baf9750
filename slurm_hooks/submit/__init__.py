"""The submit side: sbatch-almanac, its prompt, proposals, and remembered answers."""

__all__ = ("late_proposals", "prompt", "proposal", "sbatch_almanac")
