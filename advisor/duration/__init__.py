"""Run times: features of a submission, estimates, their blend, the order of the queue, and a back-test."""

__all__ = ("backtest", "blend", "features", "model", "past", "rank", "replay", "rolling", "service")
