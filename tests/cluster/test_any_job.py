"""`almanac report` answers for any job at any time: kinds of jobs x times x what the caller's host has, on real Slurm.

store: an operator who reads the store. published: a user whom only published files and Slurm serve. client: the same
on a host that lacks the libraries.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from native_site import NativeSite
from processes import wait_until
from sites import Site

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.sites("native", "24.11"),
    pytest.mark.timeout(
        1800
    ),  # all jobs are looked at in one setup: 75 s of processor time, on a core with other tests
]
PROGRAM = Path(__file__).with_name("report_as_user.py")
CONFIG = """
[site]
cluster = "{cluster}"
[store]
path = "{store}"
[prometheus]
url = "{prometheus}"
delay_s = 2
lookback_days = 1
[bindings]
prolog_dir = "{prolog}"
[filters]
min_elapsed_s = 2
[hooks]
advice_dir = "{advice}"
[reports]
own_days = 3
"""
HOSTILE = "\x1b]0;x\x07\x1b[31mev\nil\x9b1m"
WAITING, RUNNING, ENDED, LATER = TIMES = ("waiting", "running", "10 s after the end", "later")
READERS = {
    "store": ("ctl", "root", "full"),
    "published": ("login", "alice", "full"),
    "client": ("login", "alice", "client"),
}
"""Host, user, and what is installed."""
UNTIL_GO = "until [ -e go ]; do sleep 0.2; done"


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of job. script: what it runs. said: words of the answer, by time or always. asked: how its id is written.

    end: the order of an operator that ends it after the second look.
    """

    options: tuple[str, ...]
    said: dict[str, str]
    script: str = UNTIL_GO
    asked: str = "{id}"
    user: str = "alice"
    end: str = ""


def times(waiting: str, running: str, ended: str, later: str = "") -> dict[str, str]:
    return dict(zip(TIMES, (waiting, running, ended, later or ended), strict=True))


WAITS, RUNS = "its owner holds it (JobHeldUser).", "Still running, figures so far"
USUAL = times(WAITS, RUNS, "COMPLETED")
NOT_FOUND = "exit code 127: command not found"
FREE = ("not mine", "future", "older", "cancelled", "dependency")
"""Kinds that are not held at first, or stay so."""
KINDS = {
    "gpu": Kind(("--gpus=1",), times(WAITS, RUNS, "COMPLETED", "18.0 GiB"),
                f"echo 18 >{{profiles}}/$SLURM_JOB_ID; {UNTIL_GO}; date +%s.%N >ended"),
    "cpu": Kind((), USUAL),
    "silent": Kind(("--gpus=1",), USUAL, f"echo silent >{{profiles}}/$SLURM_JOB_ID; {UNTIL_GO}"),
    "hostile name": Kind(("-J", HOSTILE), USUAL),
    "numeric name": Kind(("-J", "12345"), USUAL),
    "array": Kind(("-a", "0-1"), times("{id}_[0-1] waits", "Job {id}_1", "Job {id}_1", "Job {id}_0")),
    "task": Kind(("-a", "3-4"), times("waits to start", *["Job {id}_4"] * 2), asked="{id}_4"),
    "no task": Kind(("-a", "3-4"), dict.fromkeys(TIMES, "job {id} has no task {id}_9"), asked="{id}_9"),
    "heterogeneous": Kind(("--gpus=1", ":", "--ntasks=1"), times(
        "waits to start", "Job {id}+1", "Job {id}+0", "Job {id}+1")),
    "step": Kind(("--gpus=1",), times(WAITS, RUNS, "Step 0"), f"srun sh -c '{UNTIL_GO}'", "{id}.0"),
    "0 s with GPU": Kind(("--gpus=1",), times(WAITS, *[NOT_FOUND] * 2), "no-such-command"),
    "0 s without": Kind((), times(WAITS, *[NOT_FOUND] * 2), "no-such-command"),
    "killed": Kind((), times(WAITS, RUNS, "killed"), f"{UNTIL_GO}; kill -9 $$"),
    "timeout": Kind(("-t", "5"), times(WAITS, RUNS, "TIMEOUT"), "sleep 300",
                    end="scontrol update jobid={id} EndTime=now+1"),
    "node fail": Kind(("-w", "n4", "--exclusive", "--no-requeue"), times(WAITS, RUNS, "NODE_FAIL"),
                      end="scontrol update nodename=n4 state=down reason=test"),
    "stopped": Kind(("--gpus=1",), times(WAITS, RUNS, "CANCELLED"), "sleep 300", end="scancel {id}"),
    "cancelled": Kind(("--hold",), times(WAITS, WAITS, "never started"), end="scancel {id}"),
    "dependency": Kind(("-d", "afterok:{0 s without}"), times(
        "it waits for other jobs (--dependency) (Dependency)", "it will never start", "never started"),
        end="scancel {id}"),
    "requeued": Kind(("--gpus=1", "--requeue"), times(WAITS, *["It ran before"] * 2), "sleep 300"),
    "partition and QOS": Kind(("-p", "hbm80", "--qos=slow"), times(WAITS, "hbm80", "hbm80")),
    "not mine": Kind((), dict.fromkeys(TIMES, "job {id} belongs to another user"), user="bob"),
    "future": Kind((), dict.fromkeys(TIMES, "no job has the number {id} yet")),
    "older": Kind(("--test-only",), dict.fromkeys(TIMES, "job {id} is in no record")),
}  # fmt: skip


@dataclasses.dataclass
class Answers:
    """By time, reader, and command: code, output, and errors. first: exit code, and seconds after a job's end, of
    the first report that has it.
    """

    found: dict[tuple[str, str], dict[str, tuple[int, str, str]]] = dataclasses.field(default_factory=dict)
    ids: dict[str, int] = dataclasses.field(default_factory=dict)
    first: tuple[int, float] = (-1, 0.0)

    def of(self, time: str, reader: str, kind: str) -> str:
        code, out, err = self.found[time, reader][f"report {KINDS[kind].asked.format(id=self.ids[kind])}"]
        return f"{code} {' '.join((out + err).replace('│', ' ').split())}"


@dataclasses.dataclass(frozen=True)
class Places:
    """Programs and paths that differ by site. folder: with configurations and the store; on ctl and login."""

    site: Site
    python: str
    program: str
    folder: str
    prometheus: str
    prolog: str
    profiles: str
    cluster: str

    def write_configs(self) -> None:
        for name, (host, _, kind) in READERS.items():
            text = CONFIG.format(
                cluster=self.cluster, store=f"{self.folder}/store" if name == "store" else "/nowhere/almanac",
                prometheus=self.prometheus if kind == "full" else "", prolog=self.prolog, advice=self.site.advice_dir,
            )  # fmt: skip
            self.site.write(host, f"{self.folder}/{name}.toml", text.encode())

    def ask(self, names: Sequence[str], *commands: str) -> list[dict[str, tuple[int, str, str]]]:
        """The answers of these readers, who are all asked at once."""
        started = []
        for name in names:
            host, user, kind = READERS[name]
            argv = [self.python, self.program, user, kind, f"{self.folder}/{name}.toml", *commands]
            started.append(subprocess.Popen(self.site.command(host, "root", argv), stdout=subprocess.PIPE, text=True))
        return [json.loads(process.communicate(timeout=300)[0]) for process in started]


def places_of(site: Site, request: pytest.FixtureRequest) -> Places:
    if isinstance(site, NativeSite):
        cluster = request.getfixturevalue("_running_cluster")
        root = cluster.lab.root
        (root / "any").mkdir(mode=0o755)
        where = (str(root / "any"), cluster.prometheus.url, str(cluster.prolog_dir), str(root / "profiles"), "lab")
        return Places(site, sys.executable, str(PROGRAM), *where)
    folder = "/var/tmp/any"
    for host in ("ctl", "login"):
        site.run(host, "root", "mkdir", "-p", folder)
        site.write(host, f"{folder}/{PROGRAM.name}", PROGRAM.read_bytes())
    where = (folder, "http://prometheus:9090", "/var/spool/almanac/gpus", "/run/almanac/profiles", "dock")
    return Places(site, "/opt/slurm-almanac/bin/python", f"{folder}/{PROGRAM.name}", *where)


def submit(places: Places, ids: dict[str, int], name: str) -> int:
    kind = KINDS[name]
    script = f"#!/bin/sh\n{kind.script.format(profiles=places.profiles)}\n"
    hold = () if name in FREE else ("--hold",)
    options = [word.format_map(ids) for part in kind.options for word in ((":", *hold) if part == ":" else (part,))]
    options += [] if name == "node fail" else ["-x", "n4"]
    done = places.site.run("login", kind.user, "sbatch", "--parsable", "--output=%j.out", *hold, *options, stdin=script)
    return int(re.search(r"Job (\d+) to start|^(\d+)", done.stderr + done.stdout)[0].removeprefix("Job ").split()[0])


@pytest.fixture(scope="module")
def answers(_running_site: Site, request: pytest.FixtureRequest) -> Answers:
    site, seen = _running_site, Answers()
    site.reset()
    places = places_of(site, request)
    places.write_configs()

    def look(when: str) -> None:
        asked = [f"report {kind.asked.format(id=seen.ids[name])}" for name, kind in KINDS.items()]
        for name, found in zip(READERS, places.ask(list(READERS), *asked), strict=True):
            seen.found[when, name] = found

    def states() -> dict[int, str]:
        shown = site.run("ctl", "root", "squeue", "-h", "-o", "%A %T").stdout
        return {int(job): state for job, state in map(str.split, shown.splitlines())}

    site.run("ctl", "root", "sacctmgr", "-i", "add", "qos", "slow", check=False)
    site.run("ctl", "root", "sacctmgr", "-i", "modify", "user", "alice", "set", "qos+=slow", check=False)
    for name in KINDS:
        seen.ids[name] = 60_000_000 if name == "future" else submit(places, seen.ids, name)
    wait_until("bob's job to run", lambda: states().get(seen.ids["not mine"]) == "RUNNING")
    look(WAITING)
    held = [str(seen.ids[name]) for name in KINDS if name not in FREE]
    site.run("ctl", "root", "scontrol", "release", ",".join(held))
    running = [seen.ids[name] for name, kind in KINDS.items() if kind.said[RUNNING] == RUNS] + [seen.ids["requeued"]]
    wait_until("the jobs to run", lambda: all(states().get(job) == "RUNNING" for job in running))
    site.run("ctl", "root", "scontrol", "requeuehold", str(seen.ids["requeued"]))
    wait_until("the requeued job to wait", lambda: states().get(seen.ids["requeued"]) == "PENDING")
    look(RUNNING)
    with ThreadPoolExecutor(1) as asking:
        first = asking.submit(places.ask, ["published"], f"until COMPLETED report {seen.ids['gpu']}")
        for name, kind in KINDS.items():
            if kind.end:
                site.run("ctl", "root", *kind.end.format(id=seen.ids[name]).split())
        time.sleep(4)  # it imports first
        for user in ("alice", "bob"):
            site.run("login", user, "touch", "go")
        [[(code, _, answered_s)]] = (found.values() for found in first.result())
    seen.first = (code, float(answered_s) - float(site.run("login", "alice", "cat", "ended").stdout))
    site.run("ctl", "root", "scontrol", "update", "nodename=n4", "state=resume", check=False)
    ended = [job for name, job in seen.ids.items() if name not in ("requeued", "future", "older")]
    site.wait_for_accounting(*ended)
    time.sleep(10)
    look(ENDED)
    [done] = places.ask(["store"], "ingest", "summarize", "publish")
    assert not any(code for code, _, _ in done.values()), done
    look(LATER)
    site.run("ctl", "root", "scancel", str(seen.ids["requeued"]))
    return seen


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("when", TIMES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_right(answers: Answers, kind: str, when: str, reader: str) -> None:
    wanted = KINDS[kind].said[when]
    if kind == "not mine" and reader == "store":
        wanted = times(RUNS, RUNS, "COMPLETED")[when]
    said = answers.of(when, reader, kind)
    assert wanted.format(id=answers.ids[kind]) in said
    assert "\x1b" not in said and "Traceback" not in said and "Error:" not in said
    assert said.startswith("0 ") is (
        kind not in ("no task", "future", "older") and (kind != "not mine" or reader == "store")
    )


@pytest.mark.parametrize("reader", READERS)
def test_jobs_without_gpus_get_no_word_about_them(answers: Answers, reader: str) -> None:
    assert "GPU" not in answers.of(ENDED, reader, "cpu")


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["0 s with GPU", "0 s without"])
def test_only_its_owner_sees_what_a_failed_job_wrote(answers: Answers, kind: str, reader: str) -> None:
    for when in (ENDED, LATER):
        said = answers.of(when, reader, kind)
        assert ("no-such-command: not found" in said) is (reader != "store")


def test_figures_soon_after_the_end_are_those_of_later(answers: Answers) -> None:
    for reader in ("store", "published"):
        soon, later = (answers.of(when, reader, "gpu") for when in (ENDED, LATER))
        assert "18.0 GiB of" in soon and "18.0 GiB of" in later


def test_a_report_asked_for_at_the_end_says_that_it_ended(answers: Answers) -> None:
    code, seconds = answers.first
    print(f"first answer {seconds:.1f} s after the end")  # at most 3 s on a quiet machine
    assert code == 0
