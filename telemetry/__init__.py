"""Metrics and job history: sources, the Parquet store, attribution of GPUs to jobs, job metrics, and nodes."""

__all__ = ("counters", "history", "ingest", "retention", "site")
