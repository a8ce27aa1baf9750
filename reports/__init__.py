"""Job reports, digests and the site report. Holds none yet."""
