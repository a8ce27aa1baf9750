"""Failures of jobs by node and GPU: what errors mean, whose they are, and which jobs died of them."""

__all__ = ("errors", "failures")
