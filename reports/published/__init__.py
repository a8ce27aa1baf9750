"""Reports and job lists that users read without access to the store."""

__all__ = ("caller", "live", "publish")
