"""Reading a source into the store: batch by batch, stored before the watermark moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from almanac.records import Counts
from telemetry.sources.base import Source
from telemetry.store.merge import WriteResult
from telemetry.store.stale_days import opens
from telemetry.store.store import Store

Progress = Callable[[int, int], None]


@dataclass
class IngestResult:
    """What one source gave. error is what stopped it; everything before that is stored."""

    source: str
    since_s: int
    until_s: int
    counts: Counts = field(default_factory=Counts)
    written: dict[str, WriteResult] = field(default_factory=dict)


def span(store: Store, source: str, cluster: str, now_s: int, lookback_s: int, delay_s: int = 0) -> tuple[int, int]:
    """The span that an incremental run has to read: from the watermark, or lookback_s ago, up to delay_s ago."""
    until_s = now_s - delay_s
    mark = store.watermark(source, cluster)
    return (until_s - lookback_s if mark is None else min(mark, until_s)), until_s


def ingest(
    source: Source, store: Store, cluster: str, since_s: int, until_s: int, result: IngestResult, progress: Progress
) -> None:
    """Store every batch of [since_s, until_s) and move the watermark behind it; `result` is kept up to date.

    The watermark stays where it is when the span starts behind it, so that no gap is passed over. Days on which job
    metrics change are opened just before their rows do. progress is called with rows stored so far and the time (s)
    reached. Raises what the source raises: what was stored before stays stored, and the next run goes on from the
    watermark.
    """
    is_gapless: bool | None = None
    for batch in source.read(since_s, until_s):
        result.counts.add(batch.counts)
        written = result.written.get(batch.table, WriteResult())
        if batch.rows.num_rows:
            written += store.write(batch.table, cluster, batch.rows, opens(store, cluster, batch.table, batch.rows))
        result.written[batch.table] = written
        if batch.watermark_s is not None:
            if is_gapless is None:
                mark = store.watermark(source.name, cluster)
                is_gapless = mark is None or since_s <= mark
            if is_gapless:
                store.set_watermark(source.name, cluster, batch.watermark_s)
        progress(batch.rows.num_rows, batch.watermark_s or until_s)
