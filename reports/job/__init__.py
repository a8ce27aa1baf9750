"""The report of one job: its facts, rules, pictures, and texts."""
