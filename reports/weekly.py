"""Queues the weekly digests: once a week, with its first run, for who asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from almanac.config import Config
from reports.digest import render_weekly
from reports.ended import ended_since
from reports.message import compose
from reports.outbox import Outbox
from reports.week import last_week
from telemetry.store import Store

_MARK = "report-week"


def put_weekly(
    store: Store,
    cluster: str,
    outbox: Outbox,
    config: Config,
    now_s: int,
    frequency: Callable[[str], str],
    recipient: Callable[[str], str | None],
) -> Iterator[str]:
    """Queue the digest of the last whole week for each user who wants it; yields the user after each.

    The week in which mail is switched on is the first that is told. Done again after a kill, it queues what is
    missing: a week's digest of a user has one Message-ID. Raises StoreError.
    """
    week = last_week(now_s)
    told_s = store.watermark(_MARK, cluster)
    if told_s is not None and told_s < week.end_s:
        runs = ended_since(store, cluster, week.start_s)
        for user in sorted({run.user for run in runs if run.end_s < week.end_s}):
            address = recipient(user) if frequency(user) == "digest" else None
            rendered = render_weekly(store, cluster, user, config, now_s) if address else None
            if rendered is not None and address:
                about = {"cluster": cluster, "user": user, "kind": "weekly", "key": week.name}
                if outbox.put(compose(rendered, (), address, config, now_s, **about), now_s):
                    yield user
    store.set_watermark(_MARK, cluster, week.end_s)
