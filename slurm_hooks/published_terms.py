"""The terms that job_submit may have given waiting jobs, by what was published when they were submitted."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from almanac.names import name_key
from slurm_hooks.advice_file import AdviceFile, look_up
from slurm_hooks.published import EVERYBODY, TABLE, file_at
from telemetry.slurm.backend import PendingJob
from telemetry.store import Store

LATE_S = 120
"""What is published is recorded before it is in place, and may reach the controller's disk this much later."""


@dataclass
class PublishedTerms:
    """Call it with a job. Reads the table when it is first asked, and no more often."""

    store: Store
    cluster: str
    _files: dict[tuple[str, int], AdviceFile | None] = field(default_factory=dict)

    def __call__(self, job: PendingJob) -> frozenset[int]:
        """Terms of the files in force at the submission and LATE_S before, where they told job_submit to apply them."""
        key = name_key(job.name)
        found = (
            look_up(self._file(job.user, at_s), self._file(EVERYBODY, at_s), key, job.gpu_count)
            for at_s in (job.submit_s, job.submit_s - LATE_S)
        )
        return frozenset(each.term for each in found if each is not None and each.file.mode == "apply")

    @cached_property
    def _rows(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """By user, oldest first."""
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.store.read(TABLE, self.cluster).sort_by("published_s").to_pylist():
            rows.setdefault(row["user"], []).append(row)
        return rows

    def _file(self, user: str, at_s: int) -> AdviceFile | None:
        """Between two changes the file is the same, but for its end."""
        rows = self._rows.get(user, ())
        known = bisect.bisect_right(rows, at_s, key=lambda row: row["published_s"])
        if (user, known) not in self._files:
            self._files[user, known] = file_at(rows[:known], rows[known - 1]["published_s"]) if known else None
        file = self._files[user, known]
        return None if file is None or file.expires_s <= at_s else file
