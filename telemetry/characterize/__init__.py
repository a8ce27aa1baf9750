"""Tables across jobs, behind figures 1 to 11 of Cankur et al. docs/characterize.md explains each."""

__all__ = ("study", "table", "usage")
