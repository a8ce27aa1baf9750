"""The Parquet store: tables, files, marks, and checks."""
