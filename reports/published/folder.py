"""Users' own reports that are published already, in the folder of outgoing files.

    <outgoing>/user/<uid>/jobs                                    the list
    <outgoing>/user/<uid>/reports/<job id>-<submission>-<digest>  a report
    <outgoing>/.reports.json                                      which list was written for whom, and which reports
                                                                 cannot be made

File names say what is published.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass
from typing import Any

from almanac.plain_file import read_json, with_checksum
from telemetry.store.atomic import write_atomically
from telemetry.store.outgoing import Outgoing
from telemetry.store.user_files import REPORTS, explained

INDEX, MANIFEST = "jobs", ".reports.json"
REPORT_NAME = re.compile(r"(\d{1,19}-\d{1,19})-[0-9a-f]{1,16}")


@dataclass
class Listed:
    """The list last written for a uid: its user, the digest of its content, and the newest end of its jobs."""

    user: str
    digest: str
    newest_end_s: int


@dataclass(frozen=True)
class OwnFolder:
    """All reports and lists of an outgoing folder, by uid."""

    outgoing: Outgoing

    def uids(self) -> list[int]:
        """The uids with a list or reports, sorted."""
        known = (int(name) for name in self.outgoing.users() if name.isascii() and name.isdecimal())
        return sorted(uid for uid in known if self.has_index(uid) or self.reports(uid))

    def reports(self, uid: int) -> set[str]:
        """Names of the reports of a uid."""
        with contextlib.suppress(OSError):
            found = self.outgoing.path(str(uid), REPORTS).iterdir()
            return {path.name for path in found if REPORT_NAME.fullmatch(path.name)}
        return set()

    def has_index(self, uid: int) -> bool:
        return self.outgoing.path(str(uid), INDEX).is_file()

    def remove(self, uid: int, names: set[str]) -> None:
        """Remove reports. Raises StoreError."""
        self.outgoing.remove(str(uid), [f"{REPORTS}/{name}" for name in names])

    def remove_all(self, uid: int) -> None:
        """Remove the list and all reports of a uid. Raises StoreError."""
        self.remove(uid, self.reports(uid))
        self.outgoing.remove(str(uid), [INDEX])

    def listed(self, cluster: str) -> dict[int, Listed]:
        """The lists written so far, by uid; empty if the manifest is missing or damaged: all are then written again."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return {int(uid): Listed(**listed) for uid, listed in self._manifest(cluster)["users"].items()}
        return {}

    def unwritable(self, cluster: str) -> set[str]:
        """Names of reports that could not be made; empty if the manifest is missing or damaged."""
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            return set(map(str, self._manifest(cluster)["unwritable"]))
        return set()

    def _manifest(self, cluster: str) -> dict[str, Any]:
        """The manifest; empty if this cluster has none. Raises ValueError, KeyError, or TypeError if it is damaged."""
        try:
            document = read_json(self.outgoing.root / MANIFEST)
        except OSError:
            return {}
        return dict(document) if document["cluster"] == cluster else {}

    def set_published(self, cluster: str, users: dict[int, Listed], unwritable: set[str]) -> None:
        """Write the manifest: which lists were written, and which reports cannot be made."""
        document = {
            "cluster": cluster,
            "users": {str(uid): vars(listed) for uid, listed in users.items()},
            "unwritable": sorted(unwritable),
        }
        path = self.outgoing.root / MANIFEST
        with explained(path, self.outgoing.root):
            write_atomically(path, with_checksum(json.dumps(document)))
