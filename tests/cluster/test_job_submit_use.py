"""job_submit.lua in real use: the queue's order, arrays, het jobs, updates, trust, and names that mean harm."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from advice_files import advice, family, hook_on, publish, uid_of
from processes import wait_until
from sites import Site
from test_job_submit import BERT, SITE_ROWS, busy, logged, site_factor_of, submit

from almanac.names import name_key
from slurm_hooks.advice.file import AdviceRow

pytestmark = pytest.mark.cluster

__all__ = ["busy"]


def test_the_queue_is_really_started_in_the_order_of_the_site_factor(busy: Site) -> None:
    factors = {"longest": 100, "long": 2000, "short": 8000, "shortest": 11_000}
    publish(busy, uid_of(busy, "alice"), advice(*(family(name, 4, factor) for name, factor in factors.items())))
    hook_on(busy)
    jobs = {name: submit(busy, "-wn1", name=name) for name in factors}
    busy.run("ctl", "root", "scontrol", "update", "nodename=n1", "state=resume")
    for job in jobs.values():
        busy.wait_for(job, "COMPLETED")
    started = {name: busy.job(job)["StartTime"] for name, job in jobs.items()}
    assert sorted(started, key=started.__getitem__) == ["shortest", "short", "long", "longest"]


@pytest.mark.every_release
def test_an_array_of_a_thousand_is_one_submission(busy: Site) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT))
    hook_on(busy)
    since = len(busy.controller_log())
    job = submit(busy, "--array=1-1000%1")
    assert len(logged(busy, since)) == 1
    assert site_factor_of(busy, job) == 6397
    busy.run("ctl", "root", "scontrol", "update", "nodename=n1", "state=resume")
    wait_until("the first task's end", lambda: busy.job(f"{job}_1").get("JobState") == "COMPLETED")
    for task in (1, 1000):
        assert 6397 <= int(busy.job(f"{job}_{task}")["Priority"]) <= 6400


@pytest.mark.every_release
def test_each_component_of_a_het_job_has_its_own_site_factor(busy: Site) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT, AdviceRow("G", 1800, 8476, gpus=1)))
    hook_on(busy)
    since = len(busy.controller_log())
    options = ("-J", "train-bert-1", "--gpus=4", ":", "-J", "small", "--gpus=1", ":", "-n1")
    job = busy.sbatch("alice", *options)
    assert [(line["gpus"], line["site_factor"]) for line in logged(busy, since)] == [("4", "6397"), ("1", "8476")]
    assert busy.job(job + 1)["JobName"] == "small"


@pytest.mark.every_release
def test_what_the_owner_may_and_may_not_change_afterwards(busy: Site) -> None:
    """job_submit sees no update, so that a renamed job keeps its site factor until `almanac reprioritize` runs: see
    test_reprioritize.py.
    """
    publish(busy, uid_of(busy, "alice"), advice(BERT, family("quick", 4, 11_000)))
    hook_on(busy)
    job = submit(busy)
    for change in ("timelimit=5", "jobname=quick", "comment=x", "features=hbm40g", "nice=10"):
        busy.run("login", "alice", "scontrol", "update", f"jobid={job}", change)
    for change in ("sitefactor=9999", "priority=99999", "admincomment=x"):
        busy.run("login", "alice", "scontrol", "update", f"jobid={job}", change, check=False)
    assert site_factor_of(busy, job) == 6397
    assert busy.job(job)["JobName"] == "quick"


def test_a_requeued_job_keeps_its_site_factor(busy: Site) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT))
    hook_on(busy)
    job = busy.sbatch("alice", "-Jtrain-bert-1", "--gpus=4", "-wn1", "--requeue", script="#!/bin/sh\nsleep 60\n")
    busy.run("ctl", "root", "scontrol", "update", "nodename=n1", "state=resume")
    busy.wait_for(job, "RUNNING")
    publish(busy, uid_of(busy, "alice"), advice(family("train-bert-#", 4, 1)))
    busy.run("ctl", "root", "scontrol", "update", "nodename=n1", "state=drain", "reason=test")
    busy.run("login", "alice", "scontrol", "requeue", str(job))
    busy.wait_for(job, "PENDING")
    busy.run("ctl", "root", "scontrol", "update", f"jobid={job}", "starttime=now")
    assert site_factor_of(busy, job) == 6397
    busy.restart_controller()
    assert site_factor_of(busy, job) == 6397


def test_test_only_srun_and_root_for_another_user(site: Site) -> None:
    publish(site, uid_of(site, "alice"), advice(BERT))
    publish(site, uid_of(site, "root"), advice(family("train-bert-#", 4, 1)))
    hook_on(site)
    tried = site.run(
        "login", "alice", "sbatch", "--test-only", "-Jtrain-bert-1", "--gpus=4", "--wrap=true", check=False
    )
    assert tried.rc == 0 and re.match(r"sbatch: Job \d+ to start at", tried.stderr)
    wait_until("no job", lambda: not site.run("ctl", "root", "squeue", "-h").stdout)
    since = len(site.controller_log())
    assert site.run("login", "alice", "srun", "-Jtrain-bert-2", "-n1", "--gpus=4", "echo", "ran").stdout == "ran\n"
    command = ("sbatch", "--uid=alice", "-D/tmp", "-o/dev/null", "-Jtrain-bert-3", "--gpus=4", "--wrap=true")
    site.run("ctl", "root", *command)
    found = [(line["uid"], line["site_factor"]) for line in logged(site, since)]
    assert found == [(uid_of(site, "alice"), "6397")] * 2


REQUESTS = [
    ("--gpus=2",), ("--gpus=a100:2",), ("--gres=gpu:2", "-N2"), ("--gres=gpu",), ("--gres=gpu:a100:2",),
    ("--gpus-per-node=2", "-N2"), ("--gpus-per-task=1", "-n3"), ("--gpus-per-node=1", "-wn[1-3]"),
    ("--gpus-per-task=1", "-N2", "--ntasks-per-node=2", "-n4"), ("--gres=gpu:1", "-n8", "--ntasks-per-node=4"),
    ("--gpus=6", "--gpus-per-node=3"), ("--gpus=4", "--ntasks-per-gpu=2"), ("-c4", "--gpus=1"),
]  # fmt: skip


@pytest.mark.every_release
def test_gpus_are_counted_as_slurm_gives_them(site: Site) -> None:
    publish(site, "_site", advice(AdviceRow("U", 3000, 0), mode="observe"))
    hook_on(site)
    since = len(site.controller_log())
    jobs = {options: site.sbatch("alice", *options, script="#!/bin/sh\n") for options in REQUESTS}
    asked = dict(zip(REQUESTS, [line["gpus"] for line in logged(site, since)], strict=True))
    given = {}
    for options, job in jobs.items():
        site.wait_for(job, "COMPLETED")
        said = site.job(job)
        tres = re.search(r"gres/gpu=(\d+)", said.get("AllocTRES") or said["TRES"])
        given[options] = tres[1] if tres else ""
    assert asked == given


def test_nothing_that_a_user_writes_changes_the_site_factor(busy: Site) -> None:
    alice = uid_of(busy, "alice")
    publish(busy, alice, advice(BERT))
    hook_on(busy)
    lifted = advice(family("train-bert-#", 4, 999_999)).decode()
    sched = f"{busy.advice_dir}/sched"
    for path in (f"{sched}/{alice}", f"{sched}/new", f"{busy.advice_dir}/new", f"{busy.lua_dir}/almanac.lua"):
        for command in ('printf %s "$2" >"$1"', 'printf %s "$2" >>"$1"', 'rm "$1"', 'mkfifo "$1"', 'mv "$1" "$1.old"'):
            assert busy.run("ctl", "alice", "sh", "-c", command, "sh", path, lifted, check=False).rc != 0, (
                path,
                command,
            )
    for path in (f"{sched}/{alice}", f"{sched}/_site", sched):
        assert busy.run("ctl", "alice", "cat", path, check=False).rc != 0
    # A copy of their own, names in their environment, files where they work.
    own = 'mkdir -p sched; printf %s "$1" >sched/$(id -u); cp sched/* advice; printf "error()" >almanac.lua'
    busy.run("login", "alice", "sh", "-c", own, "sh", lifted)
    environment = dict.fromkeys(("ALMANAC_ADVICE_DIR", "ALMANAC_STORE", "LUA_PATH", "LUA_INIT", "HOME"), ".")
    done = busy.run(
        "login", "alice", "sbatch", "--parsable", "-Jtrain-bert-1", "--gpus=4", "--comment=site_factor=999999",
        "--export=ALL,ALMANAC_ADVICE=apply", "-o/dev/null", "--wrap=true", env=environment,
    )  # fmt: skip
    assert site_factor_of(busy, done.stdout.strip()) == 6397
    busy.run("login", "alice", "rm", "-rf", "sched", "advice", "almanac.lua")


TOUCH = "touch /tmp/almanac-was-here"
HOSTILE = [
    "a'b\"c", f"$({TOUCH})", f"`{TOUCH}`", f"x; {TOUCH} #", "a\nlua: almanac: set site_factor=9 uid=0",
    "\x1b[31mred\x1b[2J", "a\tb\r", "%d%s%n%99999d", "[%a", "%b()", "(.-)*$", "^%", "../../etc/passwd",
    "é\u202e\u2028x", "x" * 1000, "9" * 1000, "x" * 10_240, "%" * 10_240,
    f'"..os.execute("{TOUCH}").."', "\\27]0;x\\7", "-- ]] return", "F\tx\t4\t1\t1",
]  # fmt: skip


def attempt(site: Site, text: str) -> list[tuple[int, str]]:
    """Status, and what was said but for the job's id, of a submission with the text in each place."""
    found = []
    for option in ("--job-name", "--comment", "--constraint", "--chdir"):
        command = ("sbatch", "--gpus=4", "-o/dev/null", f"{option}={text}", "--wrap=true")
        done = site.run("login", "alice", *command, check=False)
        found.append((done.rc, re.sub(r"batch job \d+", "batch job", done.stdout + done.stderr)))
    return found


@pytest.mark.every_release
def test_hostile_names_are_printed_inert_and_executed_nowhere(busy: Site) -> None:
    """A submission is accepted or refused exactly as without the hook, and said to the user the same way."""
    without = [attempt(busy, text) for text in HOSTILE]
    names = [name_key(text.replace('"', "`")) for text in HOSTILE]
    rows = [family(name, 4, 1234, text="text") for name in names]
    publish(busy, uid_of(busy, "alice"), advice(*rows))
    publish(busy, "_site", advice(*SITE_ROWS))
    hook_on(busy)
    since = len(busy.controller_log())
    assert [attempt(busy, text) for text in HOSTILE] == without
    keys = {line["key"] for line in logged(busy, since)}
    assert {name for name, tries in zip(names, without, strict=True) if tries[0][0] == 0} <= keys
    for host in ("ctl", "login"):
        assert busy.run(host, "root", "test", "-e", "/tmp/almanac-was-here", check=False).rc == 1


HUGE = "#!/bin/sh\n#SBATCH -J {}\n#SBATCH --gpus=4\n"
LOOP = 'while [ -e "$1.on" ]; do sbatch -o /dev/null "$1" >>"$1.out" 2>&1 && echo taken >>"$1.out"; done'


def test_two_loops_of_huge_names_hurt_nobody_else(site: Site) -> None:
    """slurmctld calls job_submit under its locks before it checks how long a name is."""
    publish(site, uid_of(site, "alice"), advice(BERT))
    publish(site, uid_of(site, "bob"), advice(BERT))
    hook_on(site)
    home = site.run("login", "alice", "pwd").stdout.strip()
    site.run("login", "alice", "sh", "-c", "cat >huge; : >huge.on", stdin=HUGE.format("aB0-" * 950_000))
    loops = [
        subprocess.Popen(
            site.command("login", "alice", ("sh", "-c", LOOP, "sh", f"{home}/huge"), None), stdin=subprocess.DEVNULL
        )
        for _ in range(2)
    ]
    try:
        wait_until("hostile submissions", lambda: _lines(site, "huge.out") > 2)
        jobs = [site.sbatch("bob", "-J", "train-bert-7", "--gpus=4") for _ in range(10)]
        seen = _lines(site, "huge.out")
        wait_until("the loops to go on", lambda: _lines(site, "huge.out") > seen)
    finally:
        site.run("login", "alice", "rm", "huge.on")
        for loop in loops:
            loop.wait(60)
        site.run("login", "alice", "sh", "-c", "grep -c taken huge.out; rm -f huge*", check=False)
    assert len(set(jobs)) == 10
    assert {line["uid"] for line in logged(site)[-10:]} == {uid_of(site, "bob")}


def _lines(site: Site, name: str) -> int:
    return int(site.run("login", "alice", "sh", "-c", f"cat {name} 2>/dev/null | wc -l").stdout)


# Each as slurmctld is given it; slurmdbd's database keeps another name of most.
NO_UTF_8 = ("caf\udce9-run", "\udce9", "a\udce9\udce8b", "\udcc3\udca9ok", "x\udcc3y", "\udcf0\udc9f\udc98\udc80smile",
            "\udced\udca0\udc80sur", "\udcc0\udcafover", "na\udcefve\udce9\udce9tail", "what?")  # fmt: skip


@pytest.mark.every_release
def test_the_hook_and_accounting_give_a_name_one_key(site: Site) -> None:
    publish(site, "_site", advice(*SITE_ROWS, mode="observe"))
    hook_on(site)
    since = len(site.controller_log())
    jobs = [site.sbatch("alice", "-J", name, "--gpus=1", script="#!/bin/sh\n") for name in NO_UTF_8]
    hook_keys = [line["key"] for line in logged(site, since)]
    site.wait_for_accounting(*jobs)
    found: dict[int, str] = {}

    def are_named() -> bool:
        command = ("sacct", "-aX", "-S", "now-1days", "-j", ",".join(map(str, jobs)), "--json")
        shown = json.loads(site.run("ctl", "root", *command).stdout)["jobs"]
        found.update((job["job_id"], job["name"]) for job in shown)
        return set(found) == set(jobs) and "allocation" not in found.values()  # its name until slurmdbd has the start

    wait_until("names in accounting", are_named)
    assert [name_key(found[job]) for job in jobs] == hook_keys == [name_key(name) for name in NO_UTF_8]
