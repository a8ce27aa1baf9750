"""GPU types: run times on each type, the type to ask for, and the placement of jobs on types."""

__all__ = ("backtest", "decide", "learning", "placement", "queue_forward", "queue_view", "runs", "times")
