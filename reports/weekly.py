"""The weekly digests: on the first run of a week (Mondays, UTC), to who asked for them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator

from almanac.config import Config
from reports.digest import render_weekly
from reports.ended import ended_since
from reports.message import compose
from reports.outbox import Outbox
from telemetry.store import Store

WEEK_S = 7 * 86400
_MONDAY_S = 4 * 86400
"""1970-01-05 was the first Monday."""
_MARK = "report-week"


def week_start(now_s: int) -> int:
    """The last Monday, 00:00 UTC."""
    return now_s - (now_s - _MONDAY_S) % WEEK_S


def week_name(monday_s: int) -> str:
    """ "2026-W47", of the week that begins then (ISO 8601)."""
    year, week, _ = dt.datetime.fromtimestamp(monday_s, dt.UTC).isocalendar()
    return f"{year}-W{week:02d}"


def put_weekly(
    store: Store,
    cluster: str,
    outbox: Outbox,
    config: Config,
    now_s: int,
    frequency: Callable[[str], str],
    recipient: Callable[[str], str | None],
) -> Iterator[str]:
    """Queue the digest of the week that is over, for each user who wants it; yields the user after each.

    The first week that begins after mail was switched on is the first that is told. Done again after a kill, it queues
    what is missing: a week's digest of a user has one Message-ID. Raises StoreError.
    """
    monday_s = week_start(now_s)
    last_s = store.watermark(_MARK, cluster)
    if last_s is not None and last_s < monday_s:
        runs = ended_since(store, cluster, monday_s - WEEK_S)
        for user in sorted({run.user for run in runs if run.end_s < monday_s}):
            address = recipient(user) if frequency(user) == "digest" else None
            rendered = render_weekly(store, cluster, user, config, monday_s) if address else None
            if rendered is not None and address:
                about = {"cluster": cluster, "user": user, "kind": "weekly", "key": week_name(monday_s - WEEK_S)}
                outbox.put(compose(rendered, (), address, config, now_s, **about), now_s)
                yield user
    store.set_watermark(_MARK, cluster, monday_s)
