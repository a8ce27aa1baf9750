"""The jobs that one caller may see: in the store, or in the files that `almanac publish` left for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from almanac.config import Config
from telemetry.history import load_history_table
from telemetry.job_selection import History
from telemetry.store.cluster_store import ClusterStore

if TYPE_CHECKING:
    from reports.job.context import JobContext

RUN_COLUMNS = (
    "job_id", "submit_s", "end_s", "array_job_id", "array_task_id", "het_job_id", "het_offset", "user", "gpu_count",
    "state",
)  # fmt: skip


class CallerJobs(Protocol):
    """One way to get a caller's jobs. `StoreJobs` and `OwnFiles` have it."""

    @property
    def published_s(self) -> int | None:
        """When the jobs were published (s since 1970); None for the store itself."""

    @property
    def history(self) -> History:
        """The jobs of one user, or of all that the caller may see."""

    def runs(self, user: str | None = None) -> pa.Table:
        """RUN_COLUMNS of every run of one user, or of all; published ones also have `has_report`."""

    def runs_named(self, job_ids: Sequence[int]) -> pa.Table:
        """The same of the runs whose job, array, or heterogeneous job has one of these ids, and perhaps of others."""

    def contexts(self, job_ids: Sequence[int], *, has_series: bool = True) -> list[JobContext]:
        """The reports' contexts of these jobs, in their order. Raises StoreError."""


@dataclass(frozen=True)
class StoreJobs:
    """The jobs in a store. only: the one user whose jobs the caller may see; None for an operator, who sees all."""

    store: ClusterStore
    config: Config
    now_s: int
    only: str | None

    @property
    def published_s(self) -> int | None:
        return None

    def history(
        self,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
        user: str | None = None,
        among: Mapping[str, pa.Array[Any]] | None = None,
    ) -> pa.Table:
        return load_history_table(self.store, columns, since_s, until_s, self.only or user, among)

    def runs(self, user: str | None = None) -> pa.Table:
        return self.store.read("jobs", RUN_COLUMNS, among=self._users(user))

    def runs_named(self, job_ids: Sequence[int]) -> pa.Table:
        ids, users = pa.array(job_ids, pa.int64()), self._users(None)
        return pa.concat_tables(
            self.store.read("jobs", RUN_COLUMNS, among={name: ids, **users})
            for name in ("job_id", "array_job_id", "het_job_id")
        )

    def contexts(self, job_ids: Sequence[int], *, has_series: bool = True) -> list[JobContext]:
        # `almanac jobs` needs no reports, and their imports take 0.3 s.
        from reports.job.context import build

        return build(self.store, job_ids, self.config, self.now_s, has_series=has_series, user=self.only)

    def _users(self, user: str | None) -> dict[str, pa.Array[pa.StringScalar]]:
        seen = self.only or user
        return {} if seen is None else {"user": pa.array([seen], pa.string())}
