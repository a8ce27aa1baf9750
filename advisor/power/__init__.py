"""Node demand: its forecasts, the trained model, decisions to power nodes, and their back-test."""

__all__ = ("backtest", "decide", "forecast", "lifecycle", "model", "replay", "versions")
