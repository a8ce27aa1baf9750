"""Two jobs on one GPU: what packing does to waits and run times, on pairs of jobs whose speeds were measured."""
