"""Job metrics of GPU telemetry (perlmutter-telemetry): partials per day, and their exact merge."""
