"""Memory evidence, peaks, and the bound with its calibration."""
