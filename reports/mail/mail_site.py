"""The site that a run of the mail timer works for: its store, configuration, clock, and ways to ask Slurm."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from almanac.config import Config
from telemetry.sources.configured import SourceName

if TYPE_CHECKING:
    from reports.mail.address_book import AddressBook
    from reports.mail.due import DuePlan
    from reports.mail.ended import ReportCandidate
    from reports.mail.outbox import Outbox, Told
    from telemetry.slurm.commands import SlurmCommands
    from telemetry.slurm.spool import Spool
    from telemetry.store.cluster_store import ClusterStore

PER_USER_HOUR = 20
"""More mails in an hour tell a user nothing that one digest does not."""
ReadSource = Callable[[SourceName], None]
"""Reads one configured source (by name) into the store, from where it was read last. Raises AlmanacError."""


@dataclass(frozen=True)
class MailSite:
    """What a run works on: the store, one cluster in it, and how to ask Slurm and Prometheus.

    clock: seconds since 1970, now.
    """

    store: ClusterStore
    config: Config
    commands: SlurmCommands
    read_source: ReadSource
    clock: Callable[[], int]

    @property
    def give_up_s(self) -> int:
        from reports.mail.due import GIVE_UP_S

        return GIVE_UP_S

    def earliest_end_s(self, started_s: int | None) -> int:
        """Jobs that ended before get no mail. started_s: when mail was switched on; None: not yet.

        If a clock that was ahead left started_s in the future, each run looks at the last hour.
        """
        now_s = self.clock()
        if started_s is None:
            return now_s - 86_400
        return max(now_s - 3600 if started_s > now_s else started_s, now_s - self.give_up_s)

    def look_up_waiting(self, outbox: Outbox, until_s: int) -> list[ReportCandidate]:
        """Runs of the outbox that wait for a decision at until_s, with what the store knows of them.

        Comments of the last half of GIVE_UP_S show whether accounting keeps comments. If it stops, mail goes
        on in time.
        """
        from reports.mail.ended import look_up

        comments_s = self.clock() - self.give_up_s // 2
        return look_up(self.store, outbox.waiting(until_s, self.store.cluster), comments_s)

    def plan(self, found: Sequence[ReportCandidate]) -> DuePlan:
        from reports.mail.due import Planner

        telemetry_s = (self.store.watermark("prometheus") or 0) if self.config.prometheus.url else None
        return Planner(self.frequencies(), self.recipient, self.config.mail, self.clock(), telemetry_s).plan(found)

    def frequencies(self) -> Callable[[str], str]:
        """A user's chosen frequency, looked up once."""
        from reports.mail.preferences import read

        return cache(lambda user: read(user, self.config).frequency)

    @cached_property
    def addresses(self) -> AddressBook:
        """Users' addresses, each looked up once in a run."""
        from reports.mail.address_book import AddressBook

        return AddressBook(self.config.mail)

    def recipient(self, user: str) -> str | None:
        """The user's address. None without one. Raises AddressError if it cannot be looked up now."""
        return self.addresses.address(user)

    def told(self, outbox: Outbox) -> dict[tuple[str, Told], int]:
        """When each user was last told each thing about a job family, in the last TOLD_S."""
        from reports.mail.outbox_file import TOLD_S

        return outbox.told_since(self.clock() - TOLD_S, self.store.cluster)

    def mails_left(self, outbox: Outbox) -> Callable[[str], int]:
        """How many mails each user may still get within an hour.

        The mails of the last hour and the queued mails together never exceed it, so no hour has more mails, even after
        the server was down. Weekly digests come on top: one a week.
        """
        used = outbox.mails_since(self.clock() - 3599)
        return lambda user: PER_USER_HOUR - used[user]


def spool_of(config: Config, store_root: Path, cluster: str) -> Spool:
    """The spool of the hook. Members of the store's group may remove files from it."""
    from telemetry.slurm.spool import Spool

    gids = {os.getegid(), *os.getgroups(), store_root.stat().st_gid}
    return Spool(Path(config.mail.spool_dir or os.devnull), cluster, gids)
