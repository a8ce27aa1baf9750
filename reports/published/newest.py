"""Each user's newest runs and mails, which `almanac publish` publishes."""

from __future__ import annotations

from dataclasses import dataclass

from reports.mail.record_file import read_mails, record_path
from reports.published.caller import UserMail
from telemetry.attribution.runs import IS_SUMMARIZED
from telemetry.store.schema import TABLES
from telemetry.store.store import ClusterStore

_SQL = f"""
WITH ended AS MATERIALIZED (
  SELECT j."user" AS "user", j.job_id, j.submit_s, j.start_s, j.end_s, j.array_job_id, j.array_task_id,
         j.het_job_id, j.het_offset, j.gpu_count,
         greatest(coalesce(j.gpu_count, 0), coalesce(j.gpu_count_req, 0)) AS gpus, hash(j) AS job_hash,
         {IS_SUMMARIZED} AS is_summarized
  FROM jobs j
  WHERE j.end_s >= $since_s AND j."user" IS NOT NULL AND coalesce(j.state, '') NOT IN ('REQUEUED', 'RESIZING')
    AND greatest(coalesce(j.gpu_count, 0), coalesce(j.gpu_count_req, 0)) > 0
  QUALIFY row_number() OVER (PARTITION BY j."user" ORDER BY j.end_s DESC, j.job_id DESC, j.submit_s DESC) <= $most
)
SELECT e."user", e.job_id, e.submit_s, e.end_s, e.array_job_id, e.array_task_id, e.het_job_id,
       e.het_offset, e.gpu_count, e.gpus,
       lower(to_hex(hash(e.job_hash, m.metrics_hash))), m.metrics_hash IS NOT NULL OR NOT e.is_summarized
FROM ended e LEFT JOIN (SELECT r.job_id, r.submit_s, hash(r) AS metrics_hash
                        FROM job_metrics r SEMI JOIN ended USING (job_id, submit_s)) m USING (job_id, submit_s)
ORDER BY e."user", e.end_s, e.job_id, e.submit_s
"""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A run to publish. gpu_count: allocated GPUs; gpus: allocated or requested GPUs, whichever is more.

    digest: changes with any stored value of the run. is_ready: its metrics are computed, or it will never have any.
    """

    user: str
    job_id: int
    submit_s: int
    end_s: int
    array_job_id: int | None
    array_task_id: int | None
    het_job_id: int | None
    het_offset: int | None
    gpu_count: int | None
    gpus: int
    digest: str
    is_ready: bool

    @property
    def run(self) -> str:
        return f"{self.job_id}-{self.submit_s}"


def newest_runs(store: ClusterStore, since_s: int, most: int) -> dict[str, list[Chosen]]:
    """At most `most` runs of each user that ended at since_s or later, by user, oldest end first.

    Leaves out requeued runs and parts of resized jobs, which are not whole jobs. Raises StoreError.
    """
    with store.connect() as db:
        for table in ("jobs", "job_metrics"):
            store.view(db, table, TABLES[table].schema.names)
        rows = db.execute(_SQL, {"since_s": since_s, "most": most}).fetchall()
    found: dict[str, list[Chosen]] = {}
    for row in rows:
        found.setdefault(row[0], []).append(Chosen(*row))
    return found


def newest_mails(store: ClusterStore) -> dict[str, tuple[UserMail, ...]]:
    """The newest mails by user, newest first. Raises StoreError, NotAllowedError."""
    found = read_mails(record_path(store.root), store.cluster)
    return {user: tuple(UserMail(*mail) for mail in mails) for user, mails in found.items()}
