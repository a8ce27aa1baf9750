"""Slurm, seen from outside: its commands, host lists, queue, nodes, accounting, and submission options."""

__all__ = (
    "accounting", "backend", "commands", "error_file", "host_index", "hostlist", "named_jobs", "node_sets", "nodes",
    "options", "pyslurm_backend", "queue", "queued_job", "releases", "running", "sacct", "sbatch", "states", "step_use",
    "waiting",
)  # fmt: skip
