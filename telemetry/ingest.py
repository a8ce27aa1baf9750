"""Reading sources into the store: batch by batch, stored before the watermark moves.

The order of calls: `configured_spans` says what to read, and `ingest_all` reads it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, cast

from almanac.config import Config, Prometheus
from almanac.errors import AlmanacError, ConfigError, StoreError
from almanac.hardware import is_known_label, model_text
from almanac.records import Counts
from almanac.units import DAY_S, format_count, format_duration
from telemetry.attribution.runs import opens
from telemetry.site import Site
from telemetry.sources.source import FileOfRows, RowBatch, Source
from telemetry.store.progress import ImportOutcome
from telemetry.store.store import ClusterStore
from telemetry.store.writing import PartitionWriter, WriteResult

if TYPE_CHECKING:
    import pyarrow as pa

    from telemetry.sources.prometheus import PrometheusSource

SourceName = Literal["sacct", "prometheus", "prolog", "squeue"]


def configured_sources(config: Config) -> tuple[SourceName, ...]:
    """Return the sources that a plain `almanac ingest` reads, by name; bindings first: they are gone soonest."""
    wanted: dict[SourceName, bool] = {
        "squeue": True,
        "prolog": bool(config.bindings.prolog_dir),
        "sacct": True,
        "prometheus": bool(config.prometheus.servers),
    }
    return tuple(name for name, is_wanted in wanted.items() if is_wanted)


def sources_of(name: SourceName, site: Site) -> Sequence[Source]:
    """The source of this name, or a source of each Prometheus server. Raises ConfigError if a setting is missing."""
    return prometheus_sources(site) if name == "prometheus" else [_source(name, site)]


def prometheus_sources(
    site: Site, prometheus: Prometheus | None = None, hosts: Collection[str] = ()
) -> Sequence[PrometheusSource]:
    """A source of each server that is read for the site's cluster. hosts: nodes to read; () for all."""
    from telemetry.sources.prometheus_servers import read_servers

    return read_servers(site, prometheus or site.config.prometheus, hosts, _WRITING)


def _source(name: SourceName, site: Site) -> Source:
    config = site.config
    if name == "sacct":
        from slurm.nodes import node_shapes
        from telemetry.history import open_jobs
        from telemetry.sources.jobstats_database import JobstatsDatabase
        from telemetry.sources.sacct import SacctSource

        return SacctSource(
            site.commands,
            site.cluster,
            config.tiers,
            config.slurm,
            site.now_s,
            open_jobs=lambda: open_jobs(site.store),
            # Asked for each batch: somebody may be forgotten meanwhile.
            with_steps=lambda rows: site.store.forgotten().without("jobs", rows),
            shapes=partial(node_shapes, site.commands),
            summaries=JobstatsDatabase(config.jobstats, site.cluster).summaries
            if config.jobstats.option_file
            else None,
        )
    from telemetry.sources.hook_records import PrologSource, SqueueSource

    if name == "squeue":
        return SqueueSource(site.commands, clock=site.now_s, cluster=site.cluster)
    if not config.bindings.prolog_dir:
        raise ConfigError("no folder of prolog records is configured", "set bindings.prolog_dir")
    return PrologSource(Path(config.bindings.prolog_dir), site.cluster)


LEFT_OUT = "of a user who was forgotten"
"""A reason for not keeping a job: see `almanac forget`."""

_QUIET_S = {"prometheus": 600, "squeue": math.inf}
"""Shortest spans for which a source without a record is worth a warning; DAY_S for others. squeue shows this moment."""

_WRITING = Lock()
"""Servers are read side by side, and what they gave is stored one after the other."""


def _kind(source: str) -> str:
    """Return "prometheus" for any of the servers."""
    return "prometheus" if source.startswith("prometheus.") else source


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
        length_s, least_s = self.until_s - self.since_s, _QUIET_S.get(_kind(self.source), DAY_S)
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
        """The outcome that `skip` needs."""
        written = self.written.get("telemetry", WriteResult())
        return ImportOutcome(self.counts, written.added + written.unchanged + written.replaced)


def ignore(text: str) -> None:
    """Show no warning."""


def configured_spans(
    site: Site,
    names: Sequence[SourceName] = (),
    since_s: int | None = None,
    until_s: int | None = None,
    warn: Callable[[str], None] = ignore,
) -> Iterator[SourceSpan]:
    """The sources of these names, else all that are configured, each from its watermark or from since_s.

    warn: called with a sentence if a clock left a watermark in the future. Raises ConfigError.
    """
    config, now_s = site.config, site.now_s()
    for source in (source for name in names or configured_sources(config) for source in sources_of(name, site)):
        given = getattr(source, "config", None)
        server = given if isinstance(given, Prometheus) else None
        lookback_days = server.lookback_days if server else config.slurm.lookback_days
        _pull_back_watermark(site.store, source.name, now_s, lookback_days, warn)
        delay_s = server.delay_s if server else 0
        start_s, end_s = span(site.store, source.name, now_s, lookback_days * 86400, delay_s)
        yield SourceSpan(
            source, start_s if since_s is None else since_s, end_s if until_s is None else min(until_s, end_s)
        )


def _pull_back_watermark(
    store: ClusterStore, name: str, now_s: int, lookback_days: int, warn: Callable[[str], None]
) -> None:
    """Undo a watermark that a clock left in the future: the rows before it were never read."""
    ahead_s = store.pull_back_watermark(name, now_s, now_s - lookback_days * 86400)
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
    with store.writer("telemetry", file_key) as staged:
        writer = _Writer(source.name, store, since_s, result, staged)
        try:
            for batch in source.read(since_s, until_s):
                with _WRITING:
                    writer.add(batch)
                    progress(batch.rows.num_rows, batch.watermark_s or until_s)
        except StoreError:
            raise
        except AlmanacError:
            with _WRITING:
                writer.flush()
            raise
        with _WRITING:
            writer.flush()


class _Writer:
    """Stores the batches of one source, and moves its watermark when all rows before it are stored."""

    def __init__(
        self, name: str, store: ClusterStore, since_s: int, result: IngestResult, staged: PartitionWriter
    ) -> None:
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
            self._result.counts.notes.update(_unknown_models(batch.rows))
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
            self._result.written[table] += self._staged.write(found)
        if self._mark_s is None:
            return
        if self._is_gapless is None:
            mark_s = self._store.watermark(self._name)
            self._is_gapless = mark_s is None or self._since_s <= mark_s
        if self._is_gapless and not self._result.left_out:
            self._store.set_watermark(self._name, self._mark_s)
        self._mark_s = None


def _unknown_models(rows: pa.Table) -> dict[str, int]:
    """By a note on each GPU model that is not in the hardware table, its samples. They are kept."""
    if "model" not in rows.column_names:
        return {}
    found = dict[str, int]()
    for each in cast("Any", rows["model"]).value_counts().to_pylist():
        if (label := each["values"]) and not is_known_label(label):
            found[f"GPU model not in the table: {model_text(label)}"] = each["counts"]
    return found


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
    servers: list[tuple[SourceSpan, IngestResult]] = []
    for number, each in enumerate(spans):
        name = each.source.name if each.source.name not in results else f"{each.source.name} {number + 1}"
        result = results[name] = IngestResult(each.source.name, each.since_s, each.until_s)
        if _kind(name) == "prometheus":
            servers.append((each, result))
            continue
        with show(name) as advance:
            _ingest_one(store, each, result, advance)
    if len(servers) == 1:
        with show("prometheus") as advance:
            _ingest_one(store, *servers[0], advance)
    elif servers:
        from telemetry.sources.prometheus_servers import MOST_AT_ONCE

        with show("prometheus") as advance, ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            for future in [pool.submit(_ingest_one, store, each, result, advance) for each, result in servers]:
                future.result()
    return results


def _ingest_one(store: ClusterStore, each: SourceSpan, result: IngestResult, advance: Advance) -> None:
    started = time.monotonic()
    try:
        ingest(each.source, store, each.since_s, each.until_s, result, _counting(result, advance))
    except AlmanacError as error:
        result.error = error
    result.wall_s = time.monotonic() - started


def _counting(result: IngestResult, advance: Advance) -> Progress:
    rows = 0

    def step(added: int, reached_s: int) -> None:
        nonlocal rows
        rows += added
        advance(reached_s - result.since_s, result.until_s - result.since_s, f"{format_count(rows)} rows")

    return step
