"""Priorities of pending jobs, and the log of every change."""
