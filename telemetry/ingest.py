"""Reading sources into the store: batch by batch, stored before the watermark moves.

The order of calls: `ConfiguredSources.spans` says what to read, and `ingest_all` reads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from almanac.config import Config
from almanac.errors import AlmanacError, StoreError
from almanac.records import Counts
from almanac.units import DAY_S, format_count, format_duration
from telemetry.sources.base import FileOfRows, RowBatch, Source
from telemetry.sources.configured import SourceName, configured_sources, source_of
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.imported_files import ImportOutcome
from telemetry.store.merge import WriteResult
from telemetry.store.staging import Staging
from telemetry.store.stale_days import opens

if TYPE_CHECKING:
    import pyarrow as pa

    from telemetry.slurm.commands import SlurmCommands

LEFT_OUT = "of a user who was forgotten"
"""Why a job is not kept: see `almanac forget`."""

_QUIET_S = {"prometheus": 600, "squeue": math.inf}
"""Shortest spans for which a source without a record is worth a warning; DAY_S for others. squeue shows this moment."""

Progress = Callable[[int, int], None]
Advance = Callable[[int, int, str], None]
"""Seconds done, seconds in total, and a note."""


@dataclass(frozen=True)
class SourceSpan:
    """A source, and the span [since_s, until_s) to read of it, in seconds since 1970."""

    source: Source
    since_s: int
    until_s: int


@dataclass
class IngestResult:
    """The rows that one source gave, in wall_s seconds. error stopped it; all rows before it are stored.

    is_skipped: the source is a file whose rows are all in the store, so it was not read. counts and written are then
    those of its import.
    """

    source: str
    since_s: int
    until_s: int
    counts: Counts = field(default_factory=Counts)
    written: dict[str, WriteResult] = field(default_factory=dict)
    error: AlmanacError | None = None
    wall_s: float = 0.0
    is_skipped: bool = False

    @property
    def warning(self) -> str:
        """A sentence about a source that gave no record to keep; empty for one that did, and for a short span."""
        length_s, least_s = self.until_s - self.since_s, _QUIET_S.get(self.source, DAY_S)
        if self.error or self.is_skipped or self.counts.kept or (not self.counts.seen and length_s < least_s):
            return ""
        if self.counts.seen:
            return f"{self.source}: 0 of {format_count(self.counts.seen)} records could be kept"
        of_span = "" if self.source.startswith("file:") else f" of the {format_duration(length_s)} that were read"
        return f"{self.source} gave no record{of_span}"

    @property
    def left_out(self) -> int:
        """Rows whose file is damaged: they are not stored."""
        return sum(each.left_out for each in self.written.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `almanac ingest --json` prints them."""
        return {
            "since_s": self.since_s,
            "until_s": self.until_s,
            "seen": self.counts.seen,
            "kept": self.counts.kept,
            "dropped": dict(self.counts.dropped),
            "notes": dict(self.counts.notes),
            "written": {table: vars(written) for table, written in self.written.items()},
            "error": str(self.error) if self.error else None,
            "warning": self.warning or None,
            "skipped": self.is_skipped,
        }

    def skip(self, known: ImportOutcome) -> None:
        """Take the outcome of an earlier import of the same file."""
        self.is_skipped = True
        self.counts.add(known.counts)
        self.written["telemetry"] = WriteResult(unchanged=known.rows)

    def outcome(self) -> ImportOutcome:
        """What `skip` needs."""
        written = self.written.get("telemetry", WriteResult())
        return ImportOutcome(self.counts, written.added + written.unchanged + written.replaced)


def ignore(text: str) -> None:
    """Show no warning."""


@dataclass(frozen=True)
class ConfiguredSources:
    """The sources that a configuration names, for one cluster of a store. clock: seconds since 1970."""

    config: Config
    store: ClusterStore
    commands: SlurmCommands
    clock: Callable[[], int] = lambda: int(time.time())

    def spans(
        self,
        names: Sequence[SourceName] = (),
        since_s: int | None = None,
        until_s: int | None = None,
        warn: Callable[[str], None] = ignore,
    ) -> Iterator[SourceSpan]:
        """The sources of these names, else all, each from where it was read last or from since_s.

        warn is called with a sentence where a clock left a watermark in the future. Raises ConfigError.
        """
        config, now_s = self.config, self.clock()
        for name in names or configured_sources(config):
            source = self._source(name)
            lookback_days = config.prometheus.lookback_days if name == "prometheus" else config.slurm.lookback_days
            delay_s = config.prometheus.delay_s if name == "prometheus" else 0
            self._pull_back_watermark(name, now_s, lookback_days, warn)
            start_s, end_s = span(self.store, name, now_s, lookback_days * 86400, delay_s)
            yield SourceSpan(
                source,
                start_s if since_s is None else since_s,
                end_s if until_s is None else min(until_s, end_s),
            )

    def _source(self, name: SourceName) -> Source:
        def open_ids() -> dict[int, int]:
            from telemetry.history import open_jobs

            return open_jobs(self.store)

        def without(rows: pa.Table) -> pa.Table:
            """Asked for each batch: somebody may be forgotten meanwhile."""
            return self.store.forgotten().without("jobs", rows)

        return source_of(name, self.config, self.store.cluster, self.commands, self.clock, open_ids, without)

    def _pull_back_watermark(self, name: str, now_s: int, lookback_days: int, warn: Callable[[str], None]) -> None:
        """Undo a watermark that a clock left in the future: the rows before it were never read."""
        ahead_s = self.store.pull_back_watermark(name, now_s, now_s - lookback_days * 86400)
        if ahead_s:
            warn(
                f"the watermark of {name} was {format_duration(ahead_s)} in the future: a clock was ahead; "
                f"the last {lookback_days} days are read again"
            )


def span(store: ClusterStore, source: str, now_s: int, lookback_s: int, delay_s: int = 0) -> tuple[int, int]:
    """The span that an incremental run has to read: from the watermark, or lookback_s ago, up to delay_s ago."""
    until_s = now_s - delay_s
    mark = store.watermark(source)
    return (until_s - lookback_s if mark is None else min(mark, until_s)), until_s


def ingest(
    source: Source, store: ClusterStore, since_s: int, until_s: int, result: IngestResult, progress: Progress
) -> None:
    """Store every batch of [since_s, until_s), and then move the watermark; `result` is kept up to date.

    If the span starts after the watermark, the watermark stays, so that no gap is skipped. Days whose job metrics
    change become stale just before their rows change. Telemetry is staged, so that each of its files is written once.
    Rows that a damaged file keeps out are counted, and the watermark then stays, so that they are read again.
    progress is called with the number of rows read and the time (s) reached. Raises the source's errors: earlier
    batches are stored first, and the next run continues from the watermark. A telemetry file whose rows are all in the
    store is not read.
    """
    file = source if isinstance(source, FileOfRows) else None
    file_key = file.key(since_s, until_s) if file else None
    known = store.import_outcome(file_key) if file_key else None
    if known:
        result.skip(known)
        return
    _read(source, store, since_s, until_s, result, progress, file_key)
    if file and file_key and file.is_final() and not result.left_out:
        store.complete_import(file_key, result.outcome())


def _read(
    source: Source,
    store: ClusterStore,
    since_s: int,
    until_s: int,
    result: IngestResult,
    progress: Progress,
    file_key: str | None,
) -> None:
    """`ingest` for a source that has to be read."""
    with store.staging("telemetry", file_key) as staged:
        writer = _Writer(source.name, store, since_s, result, staged)
        try:
            for batch in source.read(since_s, until_s):
                writer.add(batch)
                progress(batch.rows.num_rows, batch.watermark_s or until_s)
        except StoreError:
            raise
        except AlmanacError:
            writer.flush()
            raise
        writer.flush()


class _Writer:
    """Stores the batches of one source, and moves its watermark when all rows before it are stored."""

    def __init__(self, name: str, store: ClusterStore, since_s: int, result: IngestResult, staged: Staging) -> None:
        self._name, self._store, self._result = name, store, result
        self._staged, self._since_s = staged, since_s
        self._mark_s: int | None = None
        self._is_gapless: bool | None = None

    def add(self, batch: RowBatch) -> None:
        """Store or stage a batch. Staged rows are stored before the watermark reaches another partition file."""
        if batch.watermark_s is not None and self._file(batch.watermark_s) != self._file(self._mark_s):
            self.flush()
        self._result.counts.add(batch.counts)
        self._result.written.setdefault(batch.table, WriteResult())
        if batch.table == self._staged.spec.name:
            self._staged.add(batch.rows)
        elif (rows := self._stored(batch)).num_rows:
            found = opens(self._store, batch.table, rows)
            self._result.written[batch.table] += self._store.write(batch.table, rows, found)
        self._mark_s = self._mark_s if batch.watermark_s is None else batch.watermark_s
        if self._staged.is_full or self._staged.is_empty:
            self.flush()

    def _stored(self, batch: RowBatch) -> pa.Table:
        """The batch's rows, without those of forgotten users, which are counted."""
        rows = self._store.forgotten().without(batch.table, batch.rows)
        left_out = batch.rows.num_rows - rows.num_rows
        self._result.counts.drop(LEFT_OUT, left_out)
        self._result.counts.kept -= left_out
        return rows

    def _file(self, mark_s: int | None) -> int | None:
        """Number of the partition file with the last rows before a watermark."""
        return None if mark_s is None else (mark_s - 1) // self._staged.spec.part_s

    def flush(self) -> None:
        """Store the staged rows, then move the watermark."""
        table = self._staged.spec.name
        if not self._staged.is_empty:
            found = opens(self._store, table, self._staged.spec.schema.empty_table())
            self._result.written[table] += self._store.write_staged(self._staged, found)
        if self._mark_s is None:
            return
        if self._is_gapless is None:
            mark_s = self._store.watermark(self._name)
            self._is_gapless = mark_s is None or self._since_s <= mark_s
        if self._is_gapless and not self._result.left_out:
            self._store.set_watermark(self._name, self._mark_s)
        self._mark_s = None


def show_nothing(name: str) -> AbstractContextManager[Advance]:
    """Display no progress."""
    return nullcontext(lambda done, total, note: None)


def ingest_all(
    store: ClusterStore,
    spans: Sequence[SourceSpan],
    show: Callable[[str], AbstractContextManager[Advance]] = show_nothing,
) -> dict[str, IngestResult]:
    """Read every source; the results by its name. An AlmanacError ends one source only, and is kept in its result.

    show opens a display of the progress of the source of that name.
    """
    results: dict[str, IngestResult] = {}
    for number, each in enumerate(spans):
        name = each.source.name if each.source.name not in results else f"{each.source.name} {number + 1}"
        result = results[name] = IngestResult(each.source.name, each.since_s, each.until_s)
        started = time.monotonic()
        with show(name) as advance:
            try:
                ingest(each.source, store, each.since_s, each.until_s, result, _counting(result, advance))
            except AlmanacError as error:
                result.error = error
        result.wall_s = time.monotonic() - started
    return results


def _counting(result: IngestResult, advance: Advance) -> Progress:
    rows = 0

    def step(added: int, reached_s: int) -> None:
        nonlocal rows
        rows += added
        advance(reached_s - result.since_s, result.until_s - result.since_s, f"{format_count(rows)} rows")

    return step
