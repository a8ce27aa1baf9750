"""Waits of jobs by tier or GPU type and number of GPUs, and their back-test."""

__all__ = ("backtest", "record")
