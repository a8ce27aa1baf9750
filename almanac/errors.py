"""Every error that almanac raises on purpose.

AlmanacError                    exit 1
├── ConfigError                 exit 3   the configuration cannot be used
├── StoreError                  exit 4   the store cannot be used
│   ├── SchemaVersionError               another version of almanac wrote it
│   └── BusyError                        another process is doing the same work
├── SourceError                 exit 5   a source cannot be read at all
│   ├── CommandError                     a Slurm command is missing, failed, or timed out
│   ├── ServerError                      Prometheus did not answer, or refused
│   └── FileFormatError                  a file to import is unreadable, or has another format
├── RequestError                exit 2   a submission (script or options) cannot be parsed
├── NotAllowedError             exit 6   another user's data
└── NoModelError                exit 7   nothing has been trained yet

A single bad record is not an error: it is counted (`almanac.records.Counts`), and the rest is kept.
"""

from __future__ import annotations


class AlmanacError(Exception):
    """Printed as `error: <message>` and `try: <hint>`: what happened, the value seen, and the fix."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(AlmanacError):
    exit_code = 3


class StoreError(AlmanacError):
    exit_code = 4


class SchemaVersionError(StoreError):
    pass


class BusyError(StoreError):
    pass


class SourceError(AlmanacError):
    exit_code = 5


class CommandError(SourceError):
    pass


class ServerError(SourceError):
    pass


class FileFormatError(SourceError):
    pass


class RequestError(AlmanacError):
    exit_code = 2


class NotAllowedError(AlmanacError):
    exit_code = 6


class DamageWarning(UserWarning):
    """A damaged file was left out, and something older or less stands for it."""


class NoModelError(AlmanacError):
    exit_code = 7
