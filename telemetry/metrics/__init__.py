"""Job metrics of GPU telemetry (Cankur et al.): partials per day, and their exact merge."""

__all__ = ("dask_engine", "data_quality", "partials", "roofline", "slurm_workers", "steps", "summary")
