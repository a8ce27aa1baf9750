"""Reports by mail: what is due, the outbox, delivery, digests, and preferences."""
