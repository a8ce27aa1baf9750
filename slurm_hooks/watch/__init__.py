"""Actions on running jobs: mail about what the watch finds, and cancels, each with a line in the record before it."""

__all__ = ("act",)
