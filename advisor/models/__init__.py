"""Models of what a job will need, trained on what jobs did."""
