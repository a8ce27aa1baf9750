"""What a policy would have meant for jobs, users, and the cluster."""
