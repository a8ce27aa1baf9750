"""Files that users read without access to the store: typed JSON for each user and kind, one reader, one writer."""

__all__ = ("files", "outgoing")
