"""Installation of the hooks in a site's own scripts."""
