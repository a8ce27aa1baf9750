"""An empty package, reserved for a simulated cluster."""
