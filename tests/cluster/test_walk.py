"""The walk of docker/README.md, command by command, on each release that runs in docker."""

from __future__ import annotations

import re

import pexpect
import pytest
from docker_site import SUITES, DockerSite
from power_walk import log_of_power, wait_for_states
from processes import PATIENCE_S

pytestmark = [pytest.mark.cluster, pytest.mark.sites(*SUITES)]
SEND_MAIL = """
import smtplib
from email.message import EmailMessage
mail = EmailMessage()
mail["To"], mail["From"], mail["Subject"] = "alice@dock", "almanac@dock", "your job, übrigens"
mail.set_content("peak 18 GiB")
smtplib.SMTP("mail").send_message(mail)
"""


@pytest.fixture(scope="module")
def walked(_running_site: DockerSite) -> DockerSite:
    """The site as a newcomer has it: almanac's hooks in place, its timer running, two weeks of past."""
    _running_site.reset()
    for host, kind in (("ctl", "job-submit"), ("login", "cli-filter")):
        _running_site.run(host, "root", "almanac", "install-hooks", "--prefix", "/etc/slurm", kind, "--yes")
    _running_site.run("ctl", "root", "seed-history", timeout_s=900)
    _running_site.run("ctl", "root", "as-almanac", "publish")
    _running_site.run("ctl", "root", "as-almanac", "ingest")
    _running_site.run("ctl", "root", "as-almanac", "mail", "run")
    _running_site.run("mail", "root", "sh", "-c", "rm -f /var/mail/sink/new/*")
    return _running_site


def answer(site: DockerSite, user: str, argv: list[str], reply: str) -> str:
    """Return sbatch's output on a terminal when its question is answered so."""
    program, *rest = site.command("login", user, argv, tty=True)
    child = pexpect.spawn(program, rest, encoding="utf-8", timeout=PATIENCE_S, dimensions=(40, 120))
    child.expect_exact("for this job: ")
    shown = str(child.before)
    child.sendline(reply)
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    return shown + str(child.before)


def test_a_newcomer_submits_is_advised_and_sees_what_the_job_used(walked: DockerSite) -> None:
    shown = answer(walked, "alice", ["sbatch", "train.sh"], "y")
    assert re.search(r'your last \d+ runs of "train-bert-#" peaked at', shown)
    assert "hbm40g is enough: " in shown
    job = int(re.search(r"Submitted batch job (\d+)", shown)[1])  # type: ignore[index]
    assert walked.job(job)["Features"] == "gpu&hbm40g"
    # Waiting age adds to it, but not within seconds: the site factor alone.
    assert int(walked.job(job)["Priority"]) > 1000
    walked.wait_for(job, "COMPLETED")
    assert walked.job(job)["NodeList"] in ("n1", "n2")
    walked.wait_for_accounting(job)
    # Prometheus' newest five seconds are left for the next run.
    walked.run("ctl", "root", "sleep", "7")
    walked.run("ctl", "root", "as-almanac", "ingest")
    table = walked.run("ctl", "root", "almanac", "jobs", "-u", "alice", "-j", str(job)).stdout
    assert re.search(rf"^ *{job} .*train-bert-100.* COMPLETED .* 18/39 GiB ", table, re.MULTILINE)
    walked.run("ctl", "root", "as-almanac", "mail", "run")
    listed = walked.run("mail", "root", "mails").stdout
    assert "  1  to alice@dock  from almanac of dock <almanac@dock>  train-bert-100: OK; to run faster, " in listed
    assert f"[job {job}]" in listed
    assert "18.0 GiB" in walked.run("mail", "root", "mails", "1").stdout


def test_alice_is_still_advised_while_25_of_her_jobs_wait(walked: DockerSite) -> None:
    script = "for i in $(seq 25); do sbatch --parsable --hold train.sh; done"
    jobs = walked.run("login", "alice", "sh", "-c", f"cd /home/alice && {script}").stdout.split()
    assert len(jobs) == 25
    walked.run("ctl", "root", "as-almanac", "ingest")
    walked.run("ctl", "root", "as-almanac", "publish")
    shown = walked.run("login", "alice", "almanac", "advise", "-J", "train-bert-7", "--gpus=4", "-C", "gpu&hbm80g")
    walked.run("ctl", "root", "scancel", *jobs)
    assert shown.stdout.startswith("almanac: ask for hbm40g ")


def test_alice_hears_of_a_job_that_no_list_has(walked: DockerSite) -> None:
    job = walked.sbatch("alice", "-J", "cpu-only", script="#!/bin/sh\nno-such-command\n")
    walked.wait_for(job, "FAILED")
    walked.wait_for_accounting(job)
    shown = walked.run("login", "alice", "almanac", "report", str(job)).stdout
    assert "GPU" not in shown and "FAILED" in shown and "127" in shown
    assert walked.run("login", "bob", "almanac", "report", str(job), check=False).rc != 0


def test_what_alice_is_told_is_hers_alone(walked: DockerSite) -> None:
    assert "train-bert" in walked.run("login", "alice", "almanac", "advise", "-J", "train-bert-7", "--gpus=4").stdout
    bob = walked.run("login", "bob", "almanac", "advise", "-J", "train-bert-7", "--gpus=4", check=False)
    assert "GiB" not in bob.stdout
    uid = walked.run("login", "alice", "id", "-u").stdout.strip()
    peek = walked.run("login", "bob", "cat", f"{walked.advice_dir}/user/{uid}/advice", check=False)
    assert peek.rc != 0 and peek.stdout == ""


def test_the_sink_takes_mail_and_shows_it(walked: DockerSite) -> None:
    walked.run("ctl", "root", "python3", "-c", SEND_MAIL)
    assert "to alice@dock  from almanac@dock  your job, übrigens" in walked.run("mail", "root", "mails").stdout
    number = walked.run("mail", "root", "mails").stdout.count("\n") - 1
    assert "peak 18 GiB" in walked.run("mail", "root", "mails", str(number)).stdout


def test_the_bmc_stops_a_node_with_its_job_and_boots_it(walked: DockerSite) -> None:
    job = walked.sbatch("alice", "-w", "n4", "--gpus=1", script="#!/bin/sh\ngpu-work 5 600\n")
    walked.wait_for(job, "RUNNING")
    assert walked.bmc("off", "n4") == "n4 off\n"
    assert walked.run("n4", "root", "pgrep", "-x", "slurmd|slurmstepd|munged", check=False).stdout == ""
    assert walked.run("n4", "root", "pgrep", "-u", "alice", check=False).stdout == ""
    walked.run("ctl", "root", "scontrol", "update", "NodeName=n4", "State=DOWN", "Reason=off")
    assert walked.bmc("on", "n4") == "n4 on\n"
    walked.run("ctl", "root", "scancel", str(job), check=False)
    # Refused where the node has registered by now, and so is back already.
    walked.run("ctl", "root", "scontrol", "update", "NodeName=n4", "State=RESUME", check=False)
    walked.wait_for_idle()


def test_a_node_goes_to_sleep_and_a_job_or_an_operator_wakes_it(walked: DockerSite) -> None:
    """Slurm calls almanac-power-off and almanac-power-on, which reach the BMC through IPMI."""
    assert walked.run("ctl", "slurm", "almanac-power-on", "--status", "n[3-4]").stdout == "n3: on\nn4: on\n"
    walked.run("ctl", "root", "scontrol", "update", "nodename=n4", "state=power_down_asap")
    wait_for_states(walked, "n4", {"IDLE", "POWERED_DOWN"})
    assert walked.bmc("status", "n4") == "n4 off\n"
    assert walked.run("n4", "root", "pgrep", "-x", "slurmd", check=False).stdout == ""
    job = walked.sbatch("alice", "-w", "n4", script="#!/bin/sh\nsleep 2\n")
    walked.wait_for(job, "COMPLETED")
    assert walked.job(job)["Restarts"] == "0"
    walked.run("ctl", "root", "scontrol", "update", "nodename=n4", "state=power_down_asap")
    wait_for_states(walked, "n4", {"IDLE", "POWERED_DOWN"})
    walked.run("ctl", "root", "almanac", "power", "wake", "n4")
    wait_for_states(walked, "n4", {"IDLE"})
    lines = [line for line in log_of_power(walked).splitlines() if '"node": "n4"' in line]
    assert len(lines) >= 4 and all('"result": "done"' in line for line in lines)
