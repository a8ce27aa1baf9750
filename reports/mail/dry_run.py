"""What `almanac report --due --dry-run` shows: the mails that are due, without asking, writing, or sending anything."""

from __future__ import annotations

import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from reports.mail.due import group_into_mails, leave_for_later, wait_for_family
from reports.mail.ended import ended_since
from reports.mail.mail_site import MailSite
from reports.mail.marks import STARTED, copy_from_store
from reports.mail.outbox import EndedRun, Outbox, outbox_path
from reports.mail.outbox_file import explained
from reports.mail.outcome import Outcome
from reports.mail.preferences import USEFUL

_FOREVER_S = 2**40
TO_JUDGE = "their user wants useful mail only; a run decides when it has their metrics"


@dataclass(frozen=True)
class DryRun:
    """mails: the runs of each mail that is due. outcome: runs that are skipped or wait.

    is_started: whether an earlier run had mail switched on.
    """

    mails: list[tuple[EndedRun, ...]]
    outcome: Outcome
    is_started: bool


def dry_run(site: MailSite) -> DryRun:
    """What a run would mail now, from what the store knows. Raises StoreError."""
    with _copied_outbox(site.store.root) as outbox:
        copy_from_store(outbox, site.store)
        started_s = outbox.mark(STARTED, site.store.cluster) if site.config.mail.server else None
        outbox.notice(ended_since(site.store, site.earliest_end_s(started_s)))
        plan, left = site.plan(site.look_up_waiting(outbox, _FOREVER_S)), site.mails_left(outbox)
        wait_for_family(plan, site.told(outbox), site.config.mail, site.clock())
        leave_for_later(plan, left)
        frequency = site.frequencies()
        judged = [each for each in plan.ready if frequency(each.run.user) == USEFUL]
        plan.delayed[TO_JUDGE] += [each.run for each in judged]
        plan.ready = [each for each in plan.ready if frequency(each.run.user) != USEFUL]
        skipped = Counter({reason: len(runs) for reason, runs in plan.skipped.items()})
        delayed = Counter({reason: len(runs) for reason, runs in plan.delayed.items()})
        mails = group_into_mails(plan.ready, site.config.mail, left)
        return DryRun(mails, Outcome(skipped=skipped, delayed=delayed), started_s is not None)


@contextmanager
def _copied_outbox(store_root: Path) -> Iterator[Outbox]:
    """A copy of the outbox, because a run may use the outbox itself now."""
    path = outbox_path(store_root)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / path.name
        if path.exists():
            with (
                explained(path),
                closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
                closing(sqlite3.connect(copy)) as to,
            ):
                source.backup(to)
        with Outbox(copy) as outbox:
            yield outbox
