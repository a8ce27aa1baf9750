"""GPU types of jobs that accept any type: which one each job gets now, and the requests that tell Slurm."""

__all__ = ("decide", "plan", "request", "run")
