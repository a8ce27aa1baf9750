"""Features and models of job durations and waiting times."""
