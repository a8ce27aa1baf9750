"""Installation of the hooks in a site's own scripts."""

__all__ = ("guarded_line", "scripts")
