"""The jobs that one caller may see: in the store, or in the files that `almanac publish` left for them.

Reading published files needs the standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from almanac.errors import FileFormatError, StoreError
from almanac.published.files import REPORTS, PublishedKind, usable, user_folder
from almanac.units import DAY_S
from reports.job.job_report import JobReport

if TYPE_CHECKING:
    import pyarrow as pa

    from reports.job.conclusions import History, Row
    from reports.published.live import LiveJobs
    from telemetry.site import Site

RUN_COLUMNS = (
    "job_id", "submit_s", "end_s", "array_job_id", "array_task_id", "het_job_id", "het_offset", "user", "gpu_count",
    "state",
)  # fmt: skip
NEXT_COLUMNS = (
    "user", "name_key", "state", "exit_code", "exit_signal", "start_s", "end_s", "elapsed_s", "time_limit_s",
    "gpu_count", "gpu_count_alloc", "gpu_share_count", "unasked_gpu_count", "verdict",
    "coverage_frac", "has_profiling_fault", "gpus_seen", "idle_gpus", "mean_gpu_util_pct",
    "mean_gr_engine_active_frac", "spatial_imbalance", "temporal_imbalance", "is_preallocated", "hbm_peak_mib",
    "hbm_peak_frac", "hbm_evidence", "hbm_max_mib", "hbm_capacity_mib", "main_pipe", "job_class",
    "mean_dram_active_frac",
    "mean_tensor_active_frac", "mean_fp64_active_frac", "mean_fp32_active_frac", "mean_fp16_active_frac",
)  # fmt: skip
"""The columns of telemetry.history.HISTORY from which the next step of a job is found."""
REPORT_NAME = re.compile(r"(\d{1,19}-\d{1,19})-[0-9a-f]{12}")
"""The file of a report: its run and the digest of its content. Those of formats before version 4 have 16 digits."""


@dataclass(frozen=True)
class JobColumn:
    """A column of the list of jobs. about: its unit or meaning."""

    kind: Literal["number", "text", "list"]
    about: str = ""


@dataclass(frozen=True)
class PublishedRun:
    """A run in the list. report: the name of its file; None if there is none yet."""

    job_id: int
    submit_s: int
    end_s: int
    array_job_id: int | None
    array_task_id: int | None
    het_job_id: int | None
    het_offset: int | None
    gpu_count: int | None
    report: str | None


@dataclass(frozen=True)
class UserMail:
    """A mail about a user's jobs. kind: job, digest, or weekly if the server took it; failed: it is tried again;
    skipped: it is not. job_id: the lowest of its jobs; 0 for a week. words: why it was not taken.
    """

    time_s: int
    kind: str
    job_id: int
    jobs: int
    to: str = ""
    words: str = ""


@dataclass(frozen=True)
class JobList:
    """A user's list. history: its columns without unknown values, and `next_step`, oldest end first.

    mails: the newest ones, newest first.
    """

    cluster: str
    user: str
    written_s: int
    columns: Mapping[str, JobColumn]
    runs: tuple[PublishedRun, ...]
    history: tuple[Mapping[str, Any], ...]
    mails: tuple[UserMail, ...] = ()


JOBS = PublishedKind("jobs", JobList, 4, is_packed=True, is_plain=False)
REPORT = PublishedKind("report", JobReport, 4, is_packed=True, is_plain=False)
"""Version 4 replaces format 3 of earlier releases, which `almanac publish` writes again."""


class CallerJobs(Protocol):
    """One way to get a caller's jobs. `StoreJobs` and `PublishedJobs` have it."""

    @property
    def published_s(self) -> int | None:
        """The time of the published list (s since 1970); None for the store itself."""

    @property
    def columns(self) -> Mapping[str, JobColumn]:
        """The columns of `history`."""

    @property
    def history(self) -> History:
        """The jobs of one user, or of all that the caller may see."""

    def next_steps(self, rows: Sequence[Row]) -> list[str]:
        """For each row, with NEXT_COLUMNS and its key, what to do next; "" for nothing."""

    def runs_named(self, job_ids: Sequence[int]) -> Sequence[Row]:
        """RUN_COLUMNS of the runs whose job, array, or heterogeneous job has one of these ids, or of more."""

    def last_job(self) -> int | None:
        """The number of the job, array, or heterogeneous job that the caller submitted last; None if there is none."""

    def reports(self, job_ids: Sequence[int]) -> list[JobReport]:
        """The reports of the newest runs of these jobs, in their order. Raises StoreError."""

    def mails(self, user: str) -> Sequence[UserMail]:
        """The newest mails about the caller's own jobs, newest first. Raises StoreError, NotAllowedError."""

    def live(self, now_s: int) -> LiveJobs | None:
        """Running jobs, as `almanac watch` last saw them; None without a round in the last minutes."""


@dataclass(frozen=True)
class StoreJobs:
    """The jobs in a store. only: the one user whose jobs the caller may see; None for an operator, who sees all."""

    site: Site
    only: str | None

    @property
    def published_s(self) -> int | None:
        return None

    @property
    def columns(self) -> Mapping[str, JobColumn]:
        return history_columns()

    def history(
        self,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
        user: str | None = None,
        among: Mapping[str, Sequence[Any]] | None = None,
    ) -> Iterator[Row]:
        import pyarrow as pa

        from telemetry.history import HISTORY, load_history_table, plain_rows

        wanted = {name: pa.array(values, HISTORY.field(name).type) for name, values in (among or {}).items()}
        rows = load_history_table(self.site.store, columns, since_s, until_s, self.only or user, wanted, has_parts=True)
        for batch in rows.to_batches(max_chunksize=65_536):
            yield from plain_rows(batch)

    def next_steps(self, rows: Sequence[Row]) -> list[str]:
        return next_steps(rows, self.site, self.history)

    def runs_named(self, job_ids: Sequence[int]) -> Sequence[Row]:
        import pyarrow as pa

        ids: dict[str, pa.Array[Any]] = {"user": pa.array([self.only], pa.string())} if self.only else {}
        found = [
            self.site.store.read("jobs", RUN_COLUMNS, among={name: pa.array(job_ids, pa.int64()), **ids})
            for name in ("job_id", "array_job_id", "het_job_id")
        ]
        return pa.concat_tables(found).to_pylist()

    def last_job(self) -> int | None:
        import pyarrow as pa

        own = {"user": pa.array([self.site.caller], pa.string())}
        return _last(self.site.store.read("jobs", RUN_COLUMNS, among=own).to_pylist())

    def reports(self, job_ids: Sequence[int]) -> list[JobReport]:
        # `almanac jobs` needs no reports, and their imports take 0.3 s.
        from reports.job.build import build
        from reports.job.conclusions import report_of

        return list(map(report_of, build(self.site, job_ids, user=self.only)))

    def mails(self, user: str) -> Sequence[UserMail]:
        from reports.mail.record_file import read_mails, record_path

        store = self.site.store
        return [UserMail(*mail) for mail in read_mails(record_path(store.root), store.cluster).get(user, ())]

    def live(self, now_s: int) -> LiveJobs | None:
        from almanac.published.outgoing import outgoing_of
        from reports.published.live import all_live

        found = all_live(outgoing_of(self.site.store.root, self.site.store.cluster), now_s)
        if found and self.only is not None:
            found = replace(found, jobs=tuple(job for job in found.jobs if job.user == self.only))
        return found


def _last(rows: Sequence[Row]) -> int | None:
    last = max(rows, key=lambda row: (row["submit_s"], row["job_id"]), default=None)
    return (last["array_job_id"] or last["het_job_id"] or last["job_id"]) if last else None


def history_columns() -> dict[str, JobColumn]:
    """The columns of telemetry.history.HISTORY."""
    import pyarrow.types as types

    from telemetry.history import HISTORY, UNITS

    def kind(of: Any) -> Literal["number", "text", "list"]:
        is_number = types.is_integer(of) or types.is_floating(of)
        return "list" if types.is_list(of) else "number" if is_number else "text"

    return {field.name: JobColumn(kind(field.type), UNITS.get(field.name, "")) for field in HISTORY}


def next_steps(rows: Sequence[Row], site: Site, history: History) -> list[str]:
    """For each row, what to do next, by the site's rules and tiers. history: the jobs that the caller may see."""
    from reports.job.conclusions import next_steps as steps_of
    from reports.job.rules import choices_of

    config = site.config
    since_s = site.now_s() - config.advice.history_days * DAY_S
    return steps_of(rows, config.tiers, history, since_s, choices_of(config).rules)


@dataclass(frozen=True)
class PublishedJobs:
    """The files published for one user. root: hooks.advice_dir."""

    root: Path
    uid: int

    @cached_property
    def index(self) -> JobList:
        """The list. Raises StoreError if nothing is published, or if it cannot be read, and FileFormatError."""
        try:
            return JOBS.read(self.root, str(self.uid), self.uid).value
        except FileNotFoundError as error:
            raise StoreError(
                f"no reports for you are published in {self.root}, and you have no access to almanac's store",
                "if your site publishes reports, one appears some time after a GPU job ends; otherwise it comes by "
                "mail, or you can ask an operator for it (`almanac report JOBID --html FILE`)",
            ) from error

    @property
    def published_s(self) -> int | None:
        return self.index.written_s

    @property
    def columns(self) -> Mapping[str, JobColumn]:
        return self.index.columns

    def history(
        self,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
        user: str | None = None,
        among: Mapping[str, Sequence[Any]] | None = None,
    ) -> Iterator[Row]:
        """The files are of one user only. Raises FileFormatError."""
        chosen = {name: set(values) for name, values in (among or {}).items()}
        for row in self.index.history:
            known = {name: self._value(row, name) for name in dict.fromkeys(("submit_s", *chosen, *columns))}
            is_late = since_s is None or known["submit_s"] >= since_s
            is_early = until_s is None or known["submit_s"] < until_s
            if is_late and is_early and all(known[name] in values for name, values in chosen.items()):
                yield {name: known[name] for name in columns}

    def _value(self, row: Row, name: str) -> Any:
        """The value of a column, of the column's kind."""
        value = row.get(name)
        kinds = {"number": int | float, "text": str | bool, "list": list}
        column = self.columns.get(name)
        if value is not None and column and not isinstance(value, kinds[column.kind]):
            path = user_folder(self.root, str(self.uid)) / JOBS.name
            raise FileFormatError(f"{path}: damaged: {name} is {value!r:.60}", "tell an operator of almanac")
        return value

    def next_steps(self, rows: Sequence[Row]) -> list[str]:
        steps = {(row.get("job_id"), row.get("submit_s")): row.get("next_step") for row in self.index.history}
        return [str(steps.get((row["job_id"], row["submit_s"])) or "") for row in rows]

    def runs_named(self, job_ids: Sequence[int]) -> Sequence[Row]:
        """Every run: the caller picks those named."""
        return [{**vars(run), "user": self.index.user} for run in self.index.runs]

    def last_job(self) -> int | None:
        return _last([vars(run) for run in self.index.runs])

    def reports(self, job_ids: Sequence[int]) -> list[JobReport]:
        newest = {run.job_id: run for run in sorted(self.index.runs, key=lambda run: run.submit_s)}
        return [self._report(newest[job_id]) for job_id in dict.fromkeys(job_ids) if job_id in newest]

    def mails(self, user: str) -> Sequence[UserMail]:
        return self.index.mails

    def live(self, now_s: int) -> LiveJobs | None:
        from reports.published.live import LIVE

        return usable(LIVE, self.root, str(self.uid), now_s)

    def _report(self, run: PublishedRun) -> JobReport:
        if run.report is None or not REPORT_NAME.fullmatch(run.report):
            raise StoreError(f"job {run.job_id}: the report is not published yet", "try again in half an hour")
        try:
            return REPORT.read(self.root, str(self.uid), self.uid, f"{REPORTS}/{run.report}").value
        except FileNotFoundError as error:
            raise StoreError(f"job {run.job_id}: the report was just replaced", "try again") from error
