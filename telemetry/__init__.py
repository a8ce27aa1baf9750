"""Metrics and job history: sources, Slurm back ends, the Parquet store, attribution, job metrics."""
