"""Policies that decide on which GPU type each job runs."""

__all__ = ("comparison",)
