"""A site with mail, a stand-in for sacct and a real SMTP server, for tests of `almanac mail run`."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_accounting import CLUSTER, Accounting, job
from forks import Run, forks_of
from mail_server import MailServer
from mails import NOW_S

from almanac.config import Config
from almanac.config_file import parse_config
from cli.app import App
from cli.ingest import run as read_sources
from cli.mail import command, mail_run
from reports.mail.due import MailOutcome
from reports.mail.record import MailRecord, record_path
from telemetry.ingest import SourceSpan
from telemetry.sources.sacct import SacctSource
from telemetry.store.store import Store

HOUR_S = 3600


@dataclass
class SiteApp(App):
    """An App with a clock, a configuration and an accounting of its own."""

    clock_s: int = NOW_S
    given: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> Config:  # type: ignore[override]
        return parse_config(self.given)

    def now_s(self) -> int:
        return self.clock_s


@dataclass
class Site:
    """A site whose mail was switched on at NOW_S. due() is a run of the timer."""

    root: Path
    server: MailServer
    app: SiteApp
    accounting: Accounting

    @property
    def store(self) -> Store:
        return Store.open(self.root / "store")

    @property
    def spool(self) -> Path:
        return self.root / "ended"

    def ends(self, job_id: int, end_s: int, user: str = "ann", **more: Any) -> None:
        self.accounting.rows.append(job(job_id, end_s, user=user, **more))

    def says_ended(self, *job_ids: int) -> None:
        """As the hook does."""
        for job_id in job_ids:
            path = self.spool / f"{job_id}.{1000 + job_id}"
            path.write_text(f"job_id={job_id}\ncluster={CLUSTER}\n")
            path.chmod(0o644)
            os.utime(path, (self.app.clock_s, self.app.clock_s))

    def ingest(self, since_s: int | None = None) -> None:
        """The timer of `almanac ingest`; since_s: not of the last six hours."""
        source = SacctSource(self.accounting, CLUSTER, (), self.app.config.slurm, self.app.now_s)
        start_s = self.app.clock_s - 6 * HOUR_S if since_s is None else since_s
        read_sources(self.store.of(CLUSTER), [SourceSpan(source, start_s, self.app.clock_s)])

    def due(self, at_s: int | None = None) -> MailOutcome:
        self.app.clock_s = self.app.clock_s if at_s is None else at_s
        with MailRecord(record_path(self.root / "store")) as record:
            return mail_run(self.app, self.store.of(CLUSTER), record).run()

    def timer(self, *options: str) -> int | None:
        """The exit code of `almanac mail run`."""
        code: int | None = command.main(["run", *options], standalone_mode=False, obj=self.app)
        return code

    @property
    def got(self) -> list[tuple[str, str]]:
        """Recipient and subject of each mail that arrived."""
        return [(to, str(mail["Subject"])) for _, recipients, mail in self.server.taken for to in recipients]

    @property
    def jobs_told(self) -> list[str]:
        return sorted(job_of(subject) for _, subject in self.got)

    def change(self, section: str, **keys: Any) -> None:
        self.app.given = {**self.app.given, section: {**self.app.given.get(section, {}), **keys}}


def know_everybody(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """The system knows every user, by a uid that owns no file; for good in a process of its own."""
    patch = monkeypatch or pytest.MonkeyPatch()
    patch.setattr(pwd, "getpwnam", lambda user: SimpleNamespace(pw_uid=2**31 - 2))


def site_of(root: Path, server: MailServer) -> Site:
    spool = root / "ended"
    given = {
        "site": {"cluster": CLUSTER},
        "hooks": {"advice_dir": str(root / "advice")},
        "mail": {
            "server": "127.0.0.1", "port": server.port, "sender": "almanac@example.org",
            "recipient": "{user}@example.org", "spool_dir": str(spool),
            "family_wait_min": 0,
        },
    }  # fmt: skip
    app = SiteApp(store_path=str(root / "store"), given=given)
    app.commands = accounting = Accounting(app.now_s)  # type: ignore[assignment]
    return Site(root, server, app, accounting)


def scenario(site: Site) -> None:
    """Five mails are due of these jobs; three if like runs share one, and four to users who want useful mail."""
    for number, user in ((2, "ann"), (3, "bob"), (4, "eve")):
        site.ends(number, NOW_S + 60 + number, user=user)
    for task in (1, 2, 3):
        site.ends(10 + task, NOW_S + 90, user="ann", array_job_id=10, array_task_id=task)
    site.ends(5, NOW_S + 70, elapsed_s=30)
    site.ends(6, NOW_S + 80, user="bob", state="FAILED")


def killed_runs(site: Site) -> AbstractContextManager[Run]:
    """Runs of the timer for the jobs of `scenario`: (step at which it is killed; 0: never) -> exit code, steps."""
    return forks_of(Path(__file__).with_name("due_worker.py"), site.root, site.server.port)


def running_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    know_everybody(monkeypatch)
    monkeypatch.setattr("reports.mail.record.DOUBTED_RUNS", 0)  # tests wait for days
    (tmp_path / "ended").mkdir(mode=0o770)
    (tmp_path / "ended").chmod(0o770)
    Store.create(tmp_path / "store")
    with MailServer() as server:
        made = site_of(tmp_path, server)
        made.ends(1, NOW_S - 7200)
        made.ingest()
        made.due()
        made.app.clock_s += 600
        yield made


def job_of(subject: str) -> str:
    """The job id in the subject of a report, or the third word of a digest's ("3 runs of x: ...")."""
    found = re.search(r"\[job (\S+)\]$", subject)
    return found[1] if found else subject.split()[2]
