"""Publishing users' own reports from the site of reports/conftest.py."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from almanac.config import Reports
from almanac.published.outgoing import Outgoing
from reports.published.caller import PublishedJobs
from reports.published.publish import OwnFolder, OwnJob, OwnPublished, publish_own
from telemetry.site import Site

CLUSTER = "test"
NOW_S = 1_795_003_200
UIDS = {"alice": 60_001, "bob": 60_002}
NAMES = {uid: user for user, uid in UIDS.items()}
IS_ROOT = os.geteuid() == 0


class Publisher:
    """Publishes from the site's store into a folder of its own."""

    def __init__(self, reported: Any, root: Path) -> None:
        self.reported, self.root, self.uids, self.now_s = reported, root, dict(UIDS), NOW_S
        self.own = Reports()

    @property
    def folder(self) -> OwnFolder:
        return OwnFolder(Outgoing(self.root))

    def __call__(self, **changes: Any) -> OwnPublished:
        config = dataclasses.replace(self.reported.config, reports=self.own)
        job = OwnJob(Site.of(self.reported.store.of(CLUSTER), config, self.now_s), self.folder)
        return publish_own(dataclasses.replace(job, **changes), self.uids.get, NAMES.get)

    def of(self, user: str) -> PublishedJobs:
        return PublishedJobs(self.root, UIDS[user])

    def files(self) -> dict[str, bytes]:
        found = (path for path in sorted((self.root / "user").rglob("*")) if path.is_file())
        return {str(path.relative_to(self.root / "user")): path.read_bytes() for path in found}

    def times(self) -> dict[str, int]:
        return {name: (self.root / "user" / name).stat().st_ino for name in self.files()}
