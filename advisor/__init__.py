"""Models of what jobs will need, and the pure decisions taken from them."""
