"""Every error that almanac raises on purpose.

AlmanacError                    exit 1
├── ConfigError                 exit 3   the configuration cannot be used
├── StoreError                  exit 4   the store cannot be used
│   ├── SchemaVersionError               written by another version of almanac
│   └── BusyError                        another process does the same at this moment
├── SourceError                 exit 5   a source cannot be read at all
│   ├── CommandError                     a Slurm command is missing, failed or timed out
│   ├── ServerError                      Prometheus did not answer, or refused
│   └── FileFormatError                  a file to import is unreadable or of another kind
├── RequestError                exit 2   a submission (script or options) that cannot be understood
├── NotAllowedError             exit 6   another user's data
└── NoModelError                exit 7   nothing has been trained yet

A record that is bad on its own is no error: it is counted (`almanac.records.Counts`) and the rest is kept.
"""

from __future__ import annotations


class AlmanacError(Exception):
    """Said to a person as: what was seen, what was expected, what to do (`hint`)."""

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


class NoModelError(AlmanacError):
    exit_code = 7
