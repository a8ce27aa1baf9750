"""Powering nodes down and up through Slurm."""
