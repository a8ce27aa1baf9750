"""Decisions: pure functions from a request and predictions to advice; no I/O, no clock, no randomness."""
