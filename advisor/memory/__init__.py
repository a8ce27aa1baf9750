"""Peak GPU memory: evidence of past runs, calibrated bound, tier to ask for, early restart, and back-test."""

__all__ = ("backtest", "calibration", "decide", "evidence", "peak_store", "restart", "runs", "tier")
