"""Packing: jobs of one user that can share a GPU, their evidence, words, and shares of the GPU."""

__all__ = ("backtest", "decide", "evidence", "shares", "text")
