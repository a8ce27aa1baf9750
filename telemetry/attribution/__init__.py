"""Which job had which GPU, and when."""
