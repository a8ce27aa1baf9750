"""Plots of what almanac found; job reports, digests and the site report are still to come."""
