"""The Parquet store: tables, partition files, and progress."""

__all__ = ("database", "forgotten", "partitions", "progress", "removal", "schema", "store", "writing")
