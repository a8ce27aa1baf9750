"""Powering nodes down and up through Slurm, and the programs that switch their power."""

__all__ = ("bmc_file", "bmc_switch", "nodes", "operators", "planning", "run", "settings")
