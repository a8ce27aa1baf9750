"""Record what was published when, in the table `advice` of the store, and find what was predicted for a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from almanac.config import Priority
from slurm_hooks.advice.file import FAMILY, GPUS, USER, AdviceFile, AdviceMatch, AdviceRow, look_up
from telemetry.store.schema import TABLES, table_of
from telemetry.store.store import ClusterStore

TABLE = "advice"
FILE = "file"
EVERYBODY = ""
"""The user of `_site`."""
_KINDS = (FAMILY, GPUS, USER)


@dataclass(frozen=True)
class PublishedChange:
    """A user's advice file before and after one run; None stands for no file."""

    user: str
    before: AdviceFile | None
    after: AdviceFile | None


def changed_rows(changes: Iterable[PublishedChange], now_s: int) -> pa.Table:
    """Return rows of the table `advice`: version and lifetime of each file, and its rows that changed."""
    return table_of(TABLES[TABLE].schema, [row for change in changes for row in _rows(change, now_s)])


def record(store: ClusterStore, rows: pa.Table) -> None:
    """Keep what changed. Raises StoreError."""
    if rows.num_rows:
        store.write(TABLE, rows)


def _rows(change: PublishedChange, now_s: int) -> Iterator[tuple[object, ...]]:
    """In the order of the table's columns. A row that is gone has no predicted_s, a file that is gone no version."""
    before, after = change.before, change.after
    scale = after.priority if after else None
    yield (
        now_s, change.user, FILE, "", 0, after.version if after else None, None, None, None, None,
        after.expires_s if after else None, after.mode if after else None,
        scale.points_per_e if scale else None, scale.min_gpu_time_s if scale else None,
        scale.max_gpu_time_s if scale else None,
    )  # fmt: skip
    old, new = ({_place(row): row for row in file.rows} if file else {} for file in (before, after))
    for place in old.keys() | new.keys():
        row = new.get(place)
        if _told(row) == _told(old.get(place)):
            continue
        version = after.version if after else None
        values = (row.predicted_s, row.site_factor, row.bound_mib, row.tier) if row else (None,) * 4
        yield (now_s, change.user, *place, version, *values, *(None,) * 5)


def _place(row: AdviceRow) -> tuple[str, str, int]:
    return row.kind, row.key, row.gpus or 0


def _told(row: AdviceRow | None) -> AdviceRow | None:
    """Return the part of a row that the table keeps."""
    return dataclasses.replace(row, gains="", text="", pilot=None) if row else None


def published_for(store: ClusterStore, user: str, key: str, gpus: int, submit_s: int) -> AdviceMatch | None:
    """The published prediction for a job at its submission: row, site factor, version, and mode; or None.

    key: name_key of the job's name. Waits and texts are not kept. A killed run can have recorded rows that it did not
    write to a file.
    """
    own, site = (published_file(store, each, submit_s) for each in (user, EVERYBODY))
    return look_up(own, site, key, gpus)


def published_file(store: ClusterStore, user: str, at_s: int) -> AdviceFile | None:
    """A user's file as it was at that time, without tiers, waits, and texts; None if none was in force."""
    known = store.read(TABLE, until_s=at_s + 1)
    return file_at(known.filter(pc.field("user") == user).sort_by("published_s").to_pylist(), at_s)


def file_at(rows: Iterable[Mapping[str, Any]], at_s: int) -> AdviceFile | None:
    """Rebuild a user's advice file as it was in force at at_s; None if there was none.

    rows: the user's rows of the table, oldest first, none of them later than at_s.
    """
    newest = {(row["kind"], row["name_key"], row["gpu_count"]): row for row in rows}
    file = newest.pop((FILE, "", 0), None)
    if file is None or file["version"] is None or file["expires_s"] <= at_s:
        return None
    kept = sorted((row for row in newest.values() if row["predicted_s"] is not None), key=lambda row: row["kind"])
    return AdviceFile(
        version=file["version"],
        written_s=file["published_s"],
        expires_s=file["expires_s"],
        mode=file["mode"],
        tell=False,
        prompt="off",
        priority=Priority(**{name: file[name] for name in ("points_per_e", "min_gpu_time_s", "max_gpu_time_s")}),
        tiers=(),
        rows=tuple(
            AdviceRow(row["kind"], row["predicted_s"], row["term"], row["name_key"], row["gpu_count"] or None,
                row["bound_mib"], row["tier"])
            for row in kept
        ),
    )  # fmt: skip
