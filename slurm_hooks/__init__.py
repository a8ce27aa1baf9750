"""Everything that Slurm calls, or that calls Slurm to act."""
