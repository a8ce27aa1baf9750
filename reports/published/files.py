"""Reads the reports that `almanac publish` wrote for a user without access to the store."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from almanac.errors import FileFormatError, StoreError
from reports.job.context import JobContext
from reports.published.folder import INDEX, REPORT_NAME
from reports.published.format import MAX_FILE_BYTES, OwnIndex, OwnRun, unpack_index, unpack_report
from telemetry.history import HISTORY
from telemetry.store.schema import schema_of
from telemetry.store.user_files import REPORTS, read_own, user_folder

_T = TypeVar("_T")
_COMPONENT = re.compile(r"([0-9]{1,19})\+([0-9]{1,9})")
_RUNS = schema_of(
    {
        "job_id": pa.int64(),
        "submit_s": pa.int64(),
        "end_s": pa.int64(),
        "array_job_id": pa.int64(),
        "array_task_id": pa.int64(),
        "het_job_id": pa.int64(),
        "het_offset": pa.int64(),
        "user": pa.string(),
        "gpu_count": pa.int64(),
        "has_report": pa.bool_(),
    }
)


@dataclass(frozen=True)
class OwnFiles:
    """The files published for one user. folder: the user's folder."""

    folder: Path
    uid: int
    index: OwnIndex

    @property
    def published_s(self) -> int | None:
        """When the list of jobs last changed (s since 1970)."""
        return self.index.written_s

    def runs_named(self, job_ids: Sequence[int]) -> pa.Table:
        """Every run: the caller picks those named."""
        return self.runs()

    def runs(self, user: str | None = None) -> pa.Table:
        """A row for each run: ids, times, user, and GPUs as in the table jobs, and has_report.

        The files are of one user only.
        """
        shown = {(row.get("job_id"), row.get("submit_s")): row.get("job") for row in self.index.history}
        rows = [
            {
                **vars(run),
                **_component(shown.get((run.job_id, run.submit_s))),
                "user": self.index.user,
                "has_report": bool(run.report),
            }
            for run in self.index.runs
        ]
        return pa.Table.from_pylist(rows, _RUNS)

    def history(
        self,
        columns: Sequence[str],
        since_s: int | None = None,
        until_s: int | None = None,
        user: str | None = None,
        among: Mapping[str, pa.Array[Any]] | None = None,
    ) -> pa.Table:
        """Rows as from telemetry.history.load_history_table, oldest end first. The files are of one user only.

        Raises FileFormatError.
        """
        rows = self._history(list(dict.fromkeys(["submit_s", *(among or {}), *columns])))
        if since_s is not None:
            rows = rows.filter(pc.field("submit_s") >= since_s)
        if until_s is not None:
            rows = rows.filter(pc.field("submit_s") < until_s)
        for name, values in (among or {}).items():
            rows = rows.filter(pc.field(name).isin(values))
        return rows.select(list(columns))

    def _history(self, columns: Sequence[str]) -> pa.Table:
        known = [{name: row.get(name) for name in columns} for row in self.index.history]
        try:
            return pa.Table.from_pylist(known, pa.schema([HISTORY.field(name) for name in columns]))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise FileFormatError(f"{self.folder / INDEX}: damaged: {error}", "tell your almanac operator") from error

    def contexts(self, job_ids: Sequence[int], *, has_series: bool = True) -> list[JobContext]:
        """The newest run of each of these jobs, in their order. Raises StoreError if one has no report yet.

        A published report holds its series: has_series does not count.
        """
        newest = {run.job_id: run for run in sorted(self.index.runs, key=lambda run: run.submit_s)}
        return [self._context(newest[job_id]) for job_id in dict.fromkeys(job_ids) if job_id in newest]

    def _context(self, run: OwnRun) -> JobContext:
        if run.report is None or not REPORT_NAME.fullmatch(run.report):
            raise StoreError(f"job {run.job_id}: the report is not published yet", "try again in half an hour")
        try:
            return _read(self.folder / REPORTS / run.report, self.uid, unpack_report)
        except FileNotFoundError as error:
            raise StoreError(f"job {run.job_id}: the report was just replaced", "try again") from error


def _component(shown: str | None) -> dict[str, int]:
    """The columns het_job_id and het_offset of an id such as "1234+1"; {} for other ids, and for older lists."""
    match = _COMPONENT.fullmatch(shown or "")
    return {"het_job_id": int(match[1]), "het_offset": int(match[2])} if match else {}


def open_own(root: Path, uid: int) -> OwnFiles:
    """The files of this user. root: hooks.advice_dir. Raises StoreError if nothing is published, FileFormatError."""
    folder = user_folder(root, str(uid))
    try:
        return OwnFiles(folder, uid, _read(folder / INDEX, uid, unpack_index))
    except FileNotFoundError as error:
        raise StoreError(
            f"no reports for you are published in {root}, and you have no access to almanac's store",
            "if your site publishes reports, one appears some time after a GPU job ends; otherwise it comes by mail, "
            "or you can ask an operator for it (`almanac report JOBID --html FILE`)",
        ) from error


def _read(path: Path, uid: int, unpack: Callable[[bytes], _T]) -> _T:
    """Raises FileFormatError, FileNotFoundError, StoreError."""
    try:
        return unpack(read_own(path, uid, MAX_FILE_BYTES))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}", "tell your almanac operator") from error
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}", error.hint) from error
