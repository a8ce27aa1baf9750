"""A seeded generator of a whole GPU site, shaped like the Perlmutter paper (perlmutter-telemetry)."""
