"""Marks of the mail timer, kept in the outbox: how far each part of a run has come, by cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reports.mail.outbox import Outbox
    from telemetry.sources.base import RowBatch, Source
    from telemetry.store.cluster_store import ClusterStore

STARTED = "started"
"""When mail was switched on: jobs that ended before get no mail."""
SEEN = "seen"
"""The end of the accounting data that was looked at."""
ASKED = "asked"
"""The time of the last accounting query of a run."""
DAILY = "day"
"""The last day that was begun."""
WEEK, WEEK_TRIED = "week", "week tried"
"""The end of the last week with digests, and the time of the last digest that failed."""
OF_THE_STORE = {
    "report-start": STARTED,
    "report": SEEN,
    "report-sacct": ASKED,
    "report-daily": DAILY,
    "report-week": WEEK,
    "report-week-tried": WEEK_TRIED,
}
"""Watermarks of the store that held the marks in older releases."""


def copy_from_store(outbox: Outbox, store: ClusterStore) -> None:
    """Copy the marks of an older release, unless the outbox has marks of this cluster. Raises StoreError."""
    found = {name: store.watermark(old) for old, name in OF_THE_STORE.items()}
    outbox.add_marks(store.cluster, {name: time_s for name, time_s in found.items() if time_s is not None})


def take_from_store(outbox: Outbox, store: ClusterStore) -> None:
    """Move the marks of an older release into the outbox. A kill in between loses none. Raises StoreError."""
    copy_from_store(outbox, store)
    for old in OF_THE_STORE:
        store.remove_watermark(old)


def start_now(outbox: Outbox, cluster: str, now_s: int) -> None:
    """Jobs that end before now get no mail."""
    for name in (STARTED, SEEN):
        outbox.set_mark(name, cluster, now_s)


@dataclass(frozen=True)
class MarkedSource:
    """A source whose mark is kept outside of the store. set_mark: gets each watermark once its batch is stored."""

    source: Source
    set_mark: Callable[[int], None]

    @property
    def name(self) -> str:
        return self.source.name

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        for batch in self.source.read(since_s, until_s):
            yield replace(batch, watermark_s=None)
            if batch.watermark_s is not None:
                self.set_mark(batch.watermark_s)
