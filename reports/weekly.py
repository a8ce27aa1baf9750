"""Queues the weekly digests: once a week, as soon as all of it is known, for who asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from almanac.config import Config
from reports.digest import render_weekly
from reports.ended import ended_since
from reports.message import compose
from reports.outbox import Message, Outbox
from reports.week import TOLD, is_known, last_week
from telemetry.store import Store


def put_weekly(
    store: Store,
    cluster: str,
    outbox: Outbox,
    config: Config,
    now_s: int,
    frequency: Callable[[str], str],
    recipient: Callable[[str], str | None],
    faults: list[str],
) -> Iterator[str]:
    """Queue the digest of the last whole week for each user who wants it; yields the user after each.

    The week in which mail is switched on is the first that is told. Nothing is done before the week is known. Done
    again after a kill, it queues what is missing: a week's digest of a user has one Message-ID. One that cannot be made
    is named in faults, left out, and keeps no other user waiting. Raises StoreError.
    """
    week = last_week(now_s)
    told_s = store.watermark(TOLD, cluster)
    if told_s is not None and told_s < week.end_s:
        if not is_known(store, cluster, config, week, now_s):
            return
        runs = ended_since(store, cluster, week.start_s)
        for user in sorted({run.user for run in runs if run.end_s < week.end_s}):
            address = recipient(user) if frequency(user) == "digest" else None
            try:
                message = _digest(store, cluster, user, address, config, now_s) if address else None
            except Exception as error:
                faults.append(f"weekly digest of {user}: {type(error).__name__}: {error}")
                continue
            if message is not None and outbox.put(message, now_s):
                yield user
    store.set_watermark(TOLD, cluster, week.end_s)


def _digest(store: Store, cluster: str, user: str, address: str, config: Config, now_s: int) -> Message | None:
    rendered = render_weekly(store, cluster, user, config, now_s)
    if rendered is None:
        return None
    week = last_week(now_s).name
    return compose(rendered, (), address, config, now_s, cluster=cluster, user=user, kind="weekly", key=week)
