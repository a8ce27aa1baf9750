"""Clusters of several GPU types: which type each job runs on, in rounds, and how far that is from the best possible."""
