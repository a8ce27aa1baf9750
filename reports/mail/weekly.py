"""Queue the weekly digests once a week, as soon as the whole week is known, for users who chose them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from almanac.config import Config
from almanac.errors import ConfigError
from almanac.units import DAY_S
from reports.mail.address_book import AddressError
from reports.mail.digest import render_weekly
from reports.mail.ended import ENDED, ended_since
from reports.mail.marks import WEEK, WEEK_TRIED
from reports.mail.message import compose, message_id_of
from reports.mail.outbox import Message, Outbox
from reports.mail.pilot import week_pilot
from reports.mail.preferences import UNKNOWN, WEEKLY
from reports.mail.week import is_known, last_week
from telemetry.store.cluster_store import ClusterStore

KIND = "weekly"
RETRY_S = 3600
LATEST_S = 2 * DAY_S


def put_weekly(
    store: ClusterStore,
    outbox: Outbox,
    config: Config,
    now_s: int,
    frequency: Callable[[str], str],
    recipient: Callable[[str], str | None],
    faults: list[str],
) -> Iterator[str]:
    """Queue the digest of the last whole week for each user who wants it, and yield each user.

    The first digests are about the week in which mail was switched on. Nothing is queued before the week is known.
    After a kill, the next call queues the digests that are missing: each has one Message-ID. A digest that cannot be
    made is named in faults and delays no other. It is tried again every hour until LATEST_S after the week, and so is
    the digest of a user whom the system does not know now, or whose address cannot be looked up.
    Raises ConfigError, StoreError.
    """
    week = last_week(now_s)
    told_s = outbox.mark(WEEK, store.cluster)
    if told_s is not None and told_s < week.end_s:
        tried_s = outbox.mark(WEEK_TRIED, store.cluster) or 0
        if tried_s <= now_s < tried_s + RETRY_S or not is_known(store, config, week, now_s):
            return
        is_whole, is_in_pilot = True, week_pilot(store, config.mail, week.start_s, week.end_s)
        runs = ended_since(store, week.start_s)
        for user in filter(is_in_pilot, sorted({run.user for run in runs if run.end_s < week.end_s})):
            wanted = frequency(user)
            is_whole &= wanted != UNKNOWN
            if wanted not in WEEKLY or outbox.has(message_id_of(store.cluster, user, KIND, (), week.name)):
                continue
            try:
                address = recipient(user)
            except AddressError:
                is_whole = False
                continue
            if address is None:
                continue
            try:
                message = _digest(store, user, address, config, now_s)
            except ConfigError:
                raise
            except Exception as error:
                faults.append(f"weekly digest of {user}: {type(error).__name__}: {error}")
                is_whole = False
                continue
            if message is not None and outbox.put(message, now_s):
                yield user
        if not is_whole and now_s < week.end_s + LATEST_S:
            outbox.set_mark(WEEK_TRIED, store.cluster, now_s)
            return
    outbox.set_mark(WEEK, store.cluster, week.end_s)


def _digest(store: ClusterStore, user: str, address: str, config: Config, now_s: int) -> Message | None:
    digest = render_weekly(store, user, config, now_s)
    if digest is None:
        return None
    given = {"cluster": store.cluster, "user": user, "kind": KIND, "key": last_week(now_s).name}
    # It tells advice, but is no reason for later failures to wait as like runs.
    told = tuple(each for each in digest.told if not each.what.startswith(ENDED))
    return replace(compose(digest.rendered, (), address, config, now_s, **given), told=told)
