"""What every part of almanac shares: configuration, errors, units, records, tiers and the name mask."""

__version__ = "0.1.0"
