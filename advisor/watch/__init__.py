"""Running jobs that idle, hang, or are about to fail: one round of the site, the findings in it, and what is due."""

__all__ = ("actions", "backtest", "decide", "live", "round")
