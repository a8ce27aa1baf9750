"""An event-driven cluster simulator: what a scheduling policy would have done with a trace of jobs."""
