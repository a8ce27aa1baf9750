"""Tables across jobs: use of the site, as Hu et al. show it, and jobs, as Cankur et al. do (docs/characterize.md)."""

__all__ = ("site_use", "study", "table", "usage")
