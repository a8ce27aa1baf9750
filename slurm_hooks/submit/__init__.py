"""The submit side: sbatch-almanac, its prompt, proposals, and remembered answers."""
