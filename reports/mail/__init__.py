"""Reports by mail: due runs, digests, recipients, the hand-over to the mail server, and the record of it."""

__all__ = ("batch", "digest", "due", "handover", "recipients", "record", "record_file", "run", "watch")
