"""An event-driven cluster simulator: what a scheduling policy would have done with a trace of jobs."""

__all__ = (
    "cluster",
    "comparison",
    "engine",
    "memory",
    "outcomes",
    "rank_choice",
    "requests",
    "scores",
    "trial",
    "workload",
)
