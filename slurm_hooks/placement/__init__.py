"""GPU types of jobs that accept any type: which one they get now, and how Slurm is told."""
