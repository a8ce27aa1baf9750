"""How long a job would wait now, by GPU type and number of GPUs."""
