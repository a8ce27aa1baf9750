"""Run times: features of a submission, rolling estimate, LightGBM model, their blend, and their back-test."""

__all__ = ("backtest", "blend", "features", "model", "past", "replay", "rolling", "service")
