"""The site factors that job_submit may have given to waiting jobs, from the advice files at their submission."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slurm_hooks.advice.file import USER, AdviceFile, Row, site_factor_of
from slurm_hooks.advice.publication_log import EVERYBODY, TABLE, file_at
from telemetry.slurm.backend import PendingJob
from telemetry.store.cluster_store import ClusterStore

LATE_S = 120
"""`almanac publish` records a file before it writes it. The file may reach the controller's disk this much later."""


@dataclass
class PublishedSiteFactors:
    """Call it with a job and its site factor. It reads the table once, at the first call.

    most_gpus: gives the number of GPUs that one job can ask for; called at most once.
    """

    store: ClusterStore
    most_gpus: Callable[[], int]
    _files: dict[tuple[str, int], AdviceFile | None] = field(default_factory=dict)

    def __call__(self, job: PendingJob, site_factor: int) -> bool:
        """Whether a file in force at the submission, or LATE_S before, could have given the job this site factor.

        Any row counts: the owner may have changed name and GPU count since. Only files of mode apply count.
        """
        files = (
            self._file(user, at_s) for user in (job.user, EVERYBODY) for at_s in (job.submit_s, job.submit_s - LATE_S)
        )
        return any(file.mode == "apply" and self._could_give(file, site_factor) for file in files if file is not None)

    def _could_give(self, file: AdviceFile, site_factor: int) -> bool:
        return any(row.site_factor == site_factor for row in file.rows if row.kind != USER) or any(
            self._is_of_some_count(row, file, site_factor) for row in file.rows if row.kind == USER
        )

    def _is_of_some_count(self, row: Row, file: AdviceFile, site_factor: int) -> bool:
        """Whether the row gives this site factor for some number of GPUs. More GPUs mean a smaller site factor."""
        counts = range(1, self._most + 1)
        place = bisect.bisect_left(counts, -site_factor, key=lambda gpus: -site_factor_of(row, gpus, file.priority))
        return place < len(counts) and site_factor_of(row, counts[place], file.priority) == site_factor

    @cached_property
    def _most(self) -> int:
        return self.most_gpus()

    @cached_property
    def _rows(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """By user, oldest first."""
        rows: dict[str, list[Mapping[str, Any]]] = {}
        for row in self.store.read(TABLE).sort_by("published_s").to_pylist():
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
