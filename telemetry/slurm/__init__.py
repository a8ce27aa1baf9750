"""Slurm, seen from outside: its commands, host lists and submission options."""
