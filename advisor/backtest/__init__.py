"""What would have been said, had almanac run all along, against what happened."""
