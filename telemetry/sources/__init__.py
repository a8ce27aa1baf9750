"""Sources of records. Every source is a `Source`: batches of rows of one table, with counts."""

__all__ = (
    "bounded_session",
    "exporters",
    "files",
    "hook_records",
    "jobstats_database",
    "live",
    "prolog_record",
    "prometheus",
    "prometheus_probe",
    "prometheus_servers",
    "sacct",
    "source",
)
