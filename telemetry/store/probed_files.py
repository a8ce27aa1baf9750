"""Record of the files without a seal that native readers were tried on, so that each is tried once.

It is one JSON file in the store: by the checksum of what was tried, why it cannot be read, or "". It is a cache:
without it, or without the right to write it, files are tried again.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from almanac.plain_file import read_json, with_checksum
from telemetry.store.atomic import write_atomically
from telemetry.store.damage import tried
from telemetry.store.probe import UNTRIED
from telemetry.store.seals import WHOLE_BYTES

_NAME = ".probed-files.json"
_MOST = 100_000
"""Entries; the oldest go first."""


@dataclass(frozen=True)
class ProbedFiles:
    """The record of a store."""

    root: Path

    def faults(self, unsealed: Mapping[Path, str]) -> dict[Path, str]:
        """Return why files cannot be read, of those that cannot. unsealed: the checksum of each."""
        known, found = self._read(), dict[Path, str]()
        new = [path for path, checksum in unsealed.items() if checksum not in known]
        if new:
            whole = [path for path in new if _size(path) <= WHOLE_BYTES]
            found = tried(whole, [path for path in new if path not in set(whole)])
            lasting = [path for path in new if not found.get(path, "").startswith(UNTRIED)]
            known |= {unsealed[path]: found.get(path, "") for path in lasting}
            self._write(known)
        return found | {path: fault for path, checksum in unsealed.items() if (fault := known.get(checksum, ""))}

    def _read(self) -> dict[str, str]:
        try:
            return {str(checksum): str(fault) for checksum, fault in read_json(self.root / _NAME)["files"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def _write(self, known: Mapping[str, str]) -> None:
        content = {"files": dict(list(known.items())[-_MOST:])}
        with contextlib.suppress(OSError):
            write_atomically(self.root / _NAME, with_checksum(json.dumps(content)), is_handed_over=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
