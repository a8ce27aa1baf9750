"""Real jobs end, the hook says so, and their owners get a mail: on every site, through a real SMTP server."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes, policy
from email.message import EmailMessage
from pathlib import Path
from typing import Protocol

import pytest
from docker_site import DockerSite
from lab import SlurmLab
from processes import LabError, wait_until
from sites import REPOSITORY, Result, Site

pytestmark = pytest.mark.cluster
sys.path.append(str(REPOSITORY / "tests/reports/mail"))

FAILED_HOOK = r"(?i)error.*(epilog_?slurmctld|epilog (exit|script|status))"
CONFIG = """
[site]
cluster = "{cluster}"
[store]
path = "{store}"
[prometheus]
url = "{prometheus}"
delay_s = 3
lookback_days = 1
[bindings]
prolog_dir = "{prolog}"
[filters]
min_elapsed_s = 5
[mail]
server = "{server}"
port = {port}
sender = "almanac@cluster.example"
recipient = "{{user}}@cluster.example"
min_elapsed_s = 5
storm = 20
family_wait_min = 0
spool_dir = "{spool}"
"""


class Almanac(Protocol):
    """almanac next to a running Slurm, and the mail that it sent. work: shell lines of a job that uses a GPU."""

    site: Site
    spool: str

    def run(self, *argv: str) -> Result: ...
    def work(self, seconds: int) -> str: ...
    def mails(self) -> list[EmailMessage]: ...


@dataclass
class OnDocker:
    site: DockerSite
    spool: str = "/var/spool/almanac/ended"

    def __post_init__(self) -> None:
        text = CONFIG.format(
            cluster="dock", store="/srv/report-test", prometheus="http://prometheus:9090", server="mail",
            port=25, prolog="/var/spool/almanac/gpus", spool=self.spool,
        )  # fmt: skip
        self.site.write("ctl", "/etc/almanac/report-test.toml", text.encode())
        self.site.run("ctl", "root", "install", "-d", "-o", "almanac", "-g", "almanac", "/srv/report-test")
        self.site.run("mail", "root", "sh", "-c", "rm -f /var/mail/sink/new/*")

    def run(self, *argv: str) -> Result:
        return self.site.run("ctl", "root", "as-almanac", "--config", "/etc/almanac/report-test.toml", *argv)

    def work(self, seconds: int) -> str:
        return f"gpu-work 18 {seconds}"

    def mails(self) -> list[EmailMessage]:
        names = self.site.run("mail", "root", "sh", "-c", "ls /var/mail/sink/new").stdout.split()
        return [parsed(self.site.read("mail", f"/var/mail/sink/new/{name}")) for name in names]


@dataclass
class OnHost:
    site: Site
    root: Path
    prometheus: str
    folder: Path
    server: object
    spool: str = ""

    def __post_init__(self) -> None:
        self.spool = str(self.root / "ended")
        text = CONFIG.format(
            cluster="lab", store=self.folder / "store", prometheus=self.prometheus, server="127.0.0.1",
            port=self.server.port, prolog=self.root / "prolog", spool=self.spool,  # type: ignore[attr-defined]
        )  # fmt: skip
        (self.folder / "almanac.toml").write_text(text)

    def run(self, *argv: str) -> Result:
        program = (sys.executable, "-m", "cli.main", "--config", str(self.folder / "almanac.toml"))
        return self.site.run("ctl", "root", *program, *argv, env={"PYTHONPATH": str(REPOSITORY)})

    def work(self, seconds: int) -> str:
        return f"echo 18 >{self.root}/profiles/$SLURM_JOB_ID; sleep {seconds}"

    def mails(self) -> list[EmailMessage]:
        return [parsed(raw) for raw in self.server.raw]  # type: ignore[attr-defined]


def parsed(raw: bytes) -> EmailMessage:
    mail = message_from_bytes(raw, policy=policy.default)
    assert isinstance(mail, EmailMessage)
    return mail


def text_of(mail: EmailMessage) -> str:
    body = mail.get_body(("plain",))
    assert body is not None
    return str(body.get_content())


@pytest.fixture(scope="module")
def almanac(
    _running_site: Site, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Almanac]:
    """Mail is switched on; what ran before is no matter of it."""
    from mail_server import MailServer

    _running_site.reset()
    if isinstance(_running_site, DockerSite):
        _running_site.wait_for_idle()
        made: Almanac = OnDocker(_running_site)
        switch_on(made)
        yield made
        return
    cluster = request.getfixturevalue("_running_cluster")
    with MailServer() as server:
        folder = tmp_path_factory.mktemp("mail")
        made = OnHost(_running_site, cluster.lab.root, cluster.prometheus.url, folder, server)
        switch_on(made)
        yield made


def switch_on(almanac: Almanac) -> None:
    """Once accounting and Prometheus have been read for the first time: a Prometheus has nothing for some seconds."""

    def has_telemetry() -> bool:
        said = json.loads(almanac.run("ingest", "--no-summary", "--json").stdout)
        return bool(said["sources"]["prometheus"]["kept"])

    wait_until("the first samples", has_telemetry)
    almanac.run("mail", "run")


@dataclass(frozen=True)
class Told:
    """Ids of the jobs that ran, by what became of them, and the mails that came of them."""

    almanac: Almanac
    jobs: dict[str, int]
    mails: list[EmailMessage]

    def of(self, what: str) -> EmailMessage:
        """The one mail of a job."""
        [mail] = [mail for mail in self.mails if f"[job {self.jobs[what]}]" in mail["Subject"]]
        return mail


@pytest.fixture(scope="module")
def told(almanac: Almanac) -> Told:
    site = almanac.site

    def submit(user: str, *options: str, work: str = almanac.work(12), tail: str = "") -> int:
        return site.sbatch(user, *options, script=f"#!/bin/sh\n{work}\n{tail}\n")

    jobs = {
        "again": submit("alice", "--gpus=1", "--requeue", work=almanac.work(14)),
        "cancelled": submit("bob", "--gpus=1", work=almanac.work(300)),
        "done": submit("alice", "--gpus=2", "-J", "train\nBcc: bob@cluster.example"),
        "bob's": submit("bob", "--gpus=1"),
        "failed": submit("alice", "--gpus=1", tail="exit 3"),
        "array": submit("bob", "--gpus=1", "--array=1-3"),
        "silent": submit("alice", "--gpus=1", "--comment=almanac:nomail"),
        "short": submit("alice", "--gpus=1", work="true"),
        "cpu": submit("alice", work="sleep 8"),
    }
    site.wait_for(jobs["again"], "RUNNING")
    site.wait_for(jobs["cancelled"], "RUNNING")
    site.run("ctl", "root", "sleep", "6")
    node = site.job(jobs["again"])["NodeList"]
    site.run("ctl", "root", "scontrol", "requeue", str(jobs["again"]))
    site.run("ctl", "root", "scancel", str(jobs["cancelled"]))
    # It would wait two minutes, and its node refuse the revoked credential for as long.
    site.wait_for(jobs["again"], "PENDING")
    site.run("ctl", "root", "scontrol", "update", f"jobid={jobs['again']}", "StartTime=now", f"ExcNodeList={node}")
    site.wait_for_accounting(*(job for what, job in jobs.items() if what != "array"))

    said: list[str] = []

    def all_came() -> bool:
        said.append(almanac.run("mail", "run").stdout)
        return len(almanac.mails()) >= 6

    try:
        wait_until("six mails", all_came)
    except LabError as error:
        subjects = [str(mail["Subject"]) for mail in almanac.mails()]
        raise LabError(f"{error}: {subjects}\n{''.join(said)}") from None
    almanac.run("mail", "run")
    return Told(almanac, jobs, almanac.mails())


def test_each_owner_gets_the_report_of_their_own_jobs_alone(told: Told) -> None:
    owners = {"done": "alice", "failed": "alice", "again": "alice", "bob's": "bob", "cancelled": "bob"}
    for what, owner in owners.items():
        mail = told.of(what)
        assert str(mail["To"]) == f"{owner}@cluster.example" and mail["Bcc"] is None and mail["Cc"] is None
    assert len(told.mails) == len(owners) + 1


def test_a_report_says_what_the_gpus_did(told: Told) -> None:
    text = text_of(told.of("done"))
    assert "18.0 GiB" in text and "GPU-hours" in text
    images = [part for part in told.of("done").walk() if part.get_content_type() == "image/png"]
    assert images


def test_how_a_job_ended_is_in_its_mail(told: Told) -> None:
    assert "failed" in text_of(told.of("failed")).lower()
    assert "cancel" in text_of(told.of("cancelled")).lower()


def test_an_array_is_one_digest(told: Told) -> None:
    [digest] = [mail for mail in told.mails if str(mail["Message-ID"]).startswith("<digest.")]
    assert str(digest["To"]) == "bob@cluster.example"
    assert "3" in str(digest["Subject"]) and str(told.jobs["array"]) in text_of(digest)


def test_who_wants_no_mail_and_what_is_too_short_or_has_no_gpu_gets_none(told: Told) -> None:
    for what in ("silent", "short", "cpu"):
        assert not any(f"[job {told.jobs[what]}]" in str(mail["Subject"]) for mail in told.mails), what


def test_the_hook_left_nothing_undone(told: Told) -> None:
    left = told.almanac.site.run("ctl", "root", "sh", "-c", f"ls -A {told.almanac.spool}").stdout
    assert left == ""
    assert not re.search(FAILED_HOOK, told.almanac.site.controller_log())


@pytest.mark.every_release
def test_with_the_package_purged_slurmctld_starts_and_jobs_end(almanac: Almanac) -> None:
    """The copy that slurm.conf names stays: without it, 24.11 and 26.05 do not start."""
    site = almanac.site
    site.run("ctl", "root", "mv", almanac.spool, f"{almanac.spool}.away")
    try:
        site.restart_controller()
        site.wait_for(site.sbatch("alice", "--gpus=1"), "COMPLETED")
    finally:
        site.run("ctl", "root", "mv", f"{almanac.spool}.away", almanac.spool)
    assert not re.search(FAILED_HOOK, site.controller_log())


def test_jobcomp_script_says_it_too(lab_root: Path) -> None:
    """Instead of EpilogSlurmctld, for sites that have one of their own."""
    conf = f"EpilogSlurmctld=/bin/true\nJobCompType=jobcomp/script\nJobCompLoc={lab_root}/hooks/ended\n"
    lab_root.chmod(0o755)
    with SlurmLab(lab_root, extra_slurm_conf=conf) as lab:
        job = lab.sbatch("alice", "--gpus=1", script="#!/bin/sh\ntrue\n")
        lab.wait_for_jobs(job)
        wait_until("its file", lambda: any((lab_root / "ended").glob(f"{job}.*")))
        [file] = (lab_root / "ended").glob(f"{job}.*")
        assert file.read_text() == f"job_id={job}\ncluster=lab\n" and file.owner() == "slurm"
