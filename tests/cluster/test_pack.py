"""almanac-pack in real jobs with a fake MPS: whatever ends a job, nothing is left, and the exit code is right."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from layout import packed_code
from processes import LabError, wait_until
from sites import Site

pytestmark = pytest.mark.cluster

NODES = ("n1", "n2", "n3", "n4")
PROGRAM = """#!/usr/bin/python3 -BIS
import os
import sys

sys.path.insert(0, "{home}/code")
from slurm_hooks.packing import mps
from slurm_hooks.packing.launcher import main

if not os.getcwd().endswith("/hung"):  # a busy machine is no reason to do without MPS here
    mps.START_S = mps.QUIT_S = 60
    mps.Mps.ask.__defaults__ = (60,)

main()
"""
PROGRAMS = {
    "waiting": "trap 'echo ended; exit 5' TERM; echo ready; while :; do sleep 0.1; done",
    "dying": """
[ "$CUDA_MPS_PIPE_DIRECTORY" ] || exec echo alone
sleep 1; echo dies >"$FAKE_MPS_MODE"
while kill -0 $(cat "$CUDA_MPS_PIPE_DIRECTORY"/*.pid) 2>/dev/null; do sleep 0.1; done
exit 6
""",
    "deaf": "trap '' TERM; echo ready; while :; do sleep 0.1; done",
    "restarted": '[ "$SLURM_RESTART_COUNT" ] && exec echo again; exec waiting',
    "where": 'echo "$SLURM_ARRAY_TASK_ID $ALMANAC_PACK_ITEM"; sleep 0.5',
}
# Processes of a job, by the environment that they were started with, and folders of its runs.
LEFT = """
for each in $(grep -alz "^SLURM_JOB_ID=$1$" /proc/[0-9]*/environ 2>/dev/null); do
    tr '\\0' ' ' <"${each%environ}cmdline" 2>/dev/null
    echo
done | grep .
ls -d /tmp/almanac-pack-"$1"-* 2>/dev/null
true
"""
# At once: nobody can clear up after another one.
KILL = """
for signal in STOP KILL; do
    for each in $(grep -alz "^SLURM_JOB_ID=$1$" /proc/[0-9]*/environ); do
        each=${each%/environ}
        kill -s $signal "${each#/proc/}"
    done
done
"""
AGE = 'touch -c -d 2020-01-01 /tmp/almanac-pack-"$1"-*'


@dataclass(frozen=True)
class Home:
    """A user's home with the code, almanac-pack, and the fake MPS program in bin."""

    site: Site
    user: str
    path: str

    def write(self, name: str, text: str, mode: int = 0o755) -> None:
        self.site.write("login", f"{self.path}/{name}", text.encode(), self.user, mode)

    def submit(self, case: str, command: str, *options: str, mps: str = "") -> Job:
        """A job in a folder of its own; mps: how the fake program behaves."""
        folder = f"{self.path}/{case}"
        self.site.run("login", self.user, "mkdir", "-p", folder)
        self.site.write("login", f"{folder}/mode", mps.encode(), self.user)
        script = f"#!/bin/bash\nexport PATH={self.path}/bin:$PATH FAKE_MPS_MODE={folder}/mode\n{command}\n"
        done = self.site.run(
            "login", self.user, "sbatch", "--parsable", "-D", folder, "-o", f"{folder}/job.out", "--mem=100",
            "--gres=gpu:a100:1", "-n1", "-c2", *options, stdin=script,
        )  # fmt: skip
        return Job(self, int(done.stdout.strip().split(";")[0]), folder)


@dataclass(frozen=True)
class Job:
    home: Home
    id: int
    folder: str

    @property
    def _site(self) -> Site:
        return self.home.site

    def text(self, name: str = "job.out") -> str:
        return self._site.run("login", self.home.user, "cat", f"{self.folder}/{name}", check=False).stdout

    def output(self, item: int) -> str:
        return self.text(f"slurm-{self.id}_{item}.out")

    def wait_until_ready(self) -> None:
        """Both tasks run."""
        wait_until(f"the tasks of job {self.id}", lambda: [self.output(n) for n in (0, 1)] == ["ready\n"] * 2)

    def calls(self) -> list[str]:
        return [line.split("\t")[0] for line in self.text("calls").splitlines()]

    def on_nodes(self, script: str) -> str:
        hosts = ("n1",) if len(self._site.different_hosts) == 1 else NODES
        return "".join(
            self._site.run(host, self.home.user, "sh", "-c", script, "sh", str(self.id), check=False).stdout
            for host in hosts
        )

    def ended(self, state: str, code: str) -> None:
        """It has ended so, and nothing of it is left on any node."""
        self.ended_as(state, code)
        try:
            wait_until(f"the end of all of job {self.id}", lambda: not self.on_nodes(LEFT))
        except LabError as error:
            raise LabError(f"{error}\n{self.text()}\nleft:\n{self.on_nodes(LEFT)}") from None

    def ended_as(self, state: str, code: str) -> None:
        """It has ended so, says accounting."""
        seen = ""

        def is_so() -> bool:
            nonlocal seen
            shown = self._site.run(
                "ctl", "root", "sacct", "-anPX", "-j", str(self.id), "-S", "now-2days", "-o", "State,ExitCode"
            )
            seen = shown.stdout.strip()
            return re.fullmatch(rf"{state}[^|]*\|{code}", seen) is not None

        try:
            wait_until(f"job {self.id} to be {state} with {code}", is_so)
        except LabError as error:
            raise LabError(f"{error}; it is {seen}\n{self.text()}") from None


def _home(site: Site, user: str) -> Home:
    path = site.run("login", user, "sh", "-c", "cd && pwd").stdout.strip()
    home = Home(site, user, path)
    unpack = (
        'find "$HOME" -mindepth 1 -maxdepth 1 ! -name train.sh ! -name ".*" -exec rm -rf {} + && '
        'mkdir -p "$HOME/code" "$HOME/bin" && tar xz -C "$HOME/code"'
    )
    done = site.run_bytes("login", user, "sh", "-c", unpack, stdin=packed_code())
    assert done.returncode == 0, done.stderr
    home.write("bin/almanac-pack", PROGRAM.format(home=path))
    for name, text in PROGRAMS.items():
        home.write(f"bin/{name}", f"#!/bin/sh\n{text}\n")
    home.write("bin/nvidia-cuda-mps-control", Path(__file__).with_name("fake_mps_control.py").read_text())
    return home


@pytest.fixture
def alice(site: Site) -> Home:
    return _home(site, "alice")


def _start_now(site: Site, job: Job) -> None:
    """Ends Slurm's requeue delay of 121 s once the job has been queued again; its owner may."""
    wait_until(f"job {job.id} to be queued again", lambda: site.job(job.id).get("Reason") == "BeginTime")
    time.sleep(2)  # slurmd refuses the job within the second in which it revoked the credential of the earlier run
    site.run("login", "alice", "scontrol", "update", f"jobid={job.id}", "starttime=now")


def test_jobs_end_in_every_way_and_leave_nothing(site: Site, alice: Home) -> None:
    """All at once, because the time limit of a job is at least a minute."""
    six = "exec almanac-pack --items 0-5 -- waiting"
    limited = alice.submit("limited", six, "--time=1")
    cancelled = alice.submit("cancelled", six)
    requeued = alice.submit("requeued", "exec almanac-pack --items 0-1 -- restarted", "--requeue")
    killed = alice.submit(
        "killed", "almanac-pack --grace 1 --items 0-1 -- waiting & echo $! >pid; wait $!; echo code $?"
    )
    crashed = alice.submit("crashed", six, "-w", "n4", "--no-requeue")
    in_step = alice.submit("step", "srun almanac-pack --items 0-5 -- waiting")
    deaf = alice.submit("deaf", "exec almanac-pack --items 0-1 -- deaf")
    plain = alice.submit("plain", "almanac-pack --grace 2 --items 0-1 -- waiting; echo code $?")  # without exec
    fine = alice.submit("fine", "exec almanac-pack --items 0-3 -- sh -c 'echo {}; exit {}'")
    one = alice.submit("one", "exec almanac-pack --items 0-1 -- sh -c 'sleep 1; exit $(({} * 7))'")
    both = alice.submit("both", "exec almanac-pack --items 4-5 -- sh -c 'sleep 1; exit {}'")
    refused = alice.submit("refused", "exec almanac-pack --items 0-1 -- true", mps="refuse")
    hung = alice.submit("hung", "exec almanac-pack --items 0-1 -- true", mps="hang")
    full = alice.submit("full", "exec almanac-pack --output /dev/full --items 0-1 -- sh -c 'sleep 0.5; echo x'")
    dead = alice.submit("dead", "exec almanac-pack --items 0-2 -- dying")

    for job in (cancelled, requeued, killed, crashed, in_step, deaf, plain):
        job.wait_until_ready()
    site.run("login", "alice", "scancel", *(str(job.id) for job in (cancelled, in_step, deaf, plain)))
    site.run("login", "alice", "scontrol", "requeue", str(requeued.id))
    site.run(site.job(killed.id)["NodeList"], "root", "kill", "-9", killed.text("pid").strip())
    crashed.on_nodes(KILL)  # as a crash of the node would, slurmstepd apart

    fine.ended("FAILED", "3:0")
    assert [fine.output(item) for item in range(4)] == ["0\n", "1\n", "2\n", "3\n"]
    assert fine.calls()[0] == "-d" and fine.calls()[-1].startswith("quit"), fine.text()
    one.ended("FAILED", "7:0")
    both.ended("FAILED", "5:0")
    refused.ended("COMPLETED", "0:0")
    hung.ended("COMPLETED", "0:0")
    assert "time-slicing" in refused.text() and "time-slicing" in hung.text()
    full.ended("FAILED", "[1-9][0-9]*:0")
    dead.ended("COMPLETED", "0:0")
    assert "the MPS daemon ended; it runs again, alone on the GPU" in dead.text()
    for job in (cancelled, in_step):
        job.ended("CANCELLED", "[0-9]+:[0-9]+")
        assert "signal 15: tasks get it too" in job.text() and "4 tasks not started" in job.text()
        assert [job.output(item).splitlines()[-1] for item in (0, 1)] == ["ended"] * 2
    for job in (deaf, plain):  # Slurm kills the launcher after KillWait, or the script at once
        job.ended("CANCELLED", "[0-9]+:[0-9]+")
    killed.ended("COMPLETED", "0:0")
    assert "code 137" in killed.text()
    assert [killed.output(item).splitlines()[-1] for item in (0, 1)] == ["ended"] * 2
    _start_now(site, requeued)
    requeued.ended("COMPLETED", "0:0")
    assert [requeued.output(item) for item in (0, 1)] == ["again\n"] * 2
    crashed.ended_as("FAILED", "0:9")
    assert crashed.on_nodes(LEFT)  # a folder alone, which the next job of its owner removes
    crashed.on_nodes(AGE)
    after = alice.submit("after", "exec almanac-pack --items 0-1 -- true", "-w", "n4")
    after.ended("COMPLETED", "0:0")
    assert "which an earlier run had left" in after.text() and not crashed.on_nodes(LEFT)
    limited.ended("TIMEOUT", "0:[0-9]+")
    assert [limited.output(item).splitlines()[-1] for item in (0, 1)] == ["ended"] * 2


@pytest.mark.every_release
def test_arrays_lists_and_steps(site: Site, alice: Home) -> None:
    """sbatch finds almanac-pack in PATH and runs a copy of it."""
    site.run("login", "alice", "mkdir", f"{alice.path}/array")
    direct = ("sbatch", "--parsable", "-D", f"{alice.path}/array", "--array=0-4:2", "--gres=gpu:a100:1", "--mem=100")
    env = {"PATH": f"{alice.path}/bin:/usr/local/bin:/usr/bin:/bin", "FAKE_MPS_MODE": f"{alice.path}/array/mode"}
    done = site.run("login", "alice", *direct, "almanac-pack", "--items", "0-4", "--", "where", env=env)
    array = Job(alice, int(done.stdout.split(";")[0]), f"{alice.path}/array")
    for name, code in (("a", 0), ("b", 3), ("c", 4)):
        alice.write(f"bin/{name}.sh", f"#!/bin/sh\necho {name} $ALMANAC_PACK_ITEM; exit {code}\n", 0o644)
    scripts = " ".join(f"{alice.path}/bin/{name}.sh" for name in "abc")
    listed = alice.submit("list", f"srun almanac-pack {scripts}")
    copies = alice.submit("copies", f"srun -n 2 --overcommit almanac-pack {scripts}")
    listed.ended("FAILED", "4:0")
    assert [listed.output(item) for item in range(3)] == ["a 0\n", "b 1\n", "c 2\n"]
    copies.ended("FAILED", "2:0")
    assert "srun started several copies" in copies.text()
    array.ended(r"(COMPLETED\|0:0\n){2}COMPLETED", "0:0")
    for item in range(5):
        assert array.output(item).splitlines()[-1] == f"{item} {item}" or item % 2 == 0
        assert f"\n{item} {item}\n" in f"\n{array.output(item)}"
    assert not array.output(5)


@pytest.mark.every_release
def test_a_packed_job_says_so_in_its_comment(site: Site, alice: Home) -> None:
    """Of an array, each task alone. The last of them has the array's id for a job id. slurmdbd keeps the comment."""
    comment = "almanac:nomail \"seed\" '3' = \\ %s\n  née; $(touch hacked)"
    waiting = "while ! [ -e go ]; do sleep 0.1; done"
    packed = alice.submit("marked", f"exec almanac-pack --items 0-1 -- sh -c '{waiting}'", f"--comment={comment}")
    lonely = alice.submit("lonely", "exec almanac-pack -n1 --items 0-1 -- sleep 1", "--comment=alone")
    # Of three tasks, the last one alone runs two items at a time.
    command = f'[ $SLURM_ARRAY_TASK_ID != 4 ] || two=2; exec almanac-pack -n ${{two:-1}} -- sh -c "{waiting}"'
    array = alice.submit("sweep", command, "--array=0-4:2", "--comment=sweep")

    def comments(job: Job) -> list[str]:
        return sorted(site.run("ctl", "root", "squeue", "-h", "-r", "-j", str(job.id), "-o", "%k").stdout.splitlines())

    is_marked = "sweep almanac:packed"
    wait_until("the mark of the array's last task", lambda: comments(array) == ["sweep", "sweep", is_marked])
    wait_until("the mark of the job", lambda: "almanac:packed" in "".join(comments(packed)))
    for job in (packed, array):
        alice.write(f"{job.folder.removeprefix(alice.path)}/go", "")
    packed.ended("COMPLETED", "0:0")
    lonely.ended("COMPLETED", "0:0")
    array.ended(r"(COMPLETED\|0:0\n){2}COMPLETED", "0:0")

    def kept(job: Job) -> list[str]:
        shown = site.run("ctl", "root", "sacct", "--json", "-X", "-j", str(job.id)).stdout
        return sorted(each["comment"]["job"] for each in json.loads(shown)["jobs"])

    assert kept(packed) == [f"{comment} almanac:packed"]
    assert kept(lonely) == ["alone"]
    assert kept(array) == ["sweep", "sweep", is_marked]
    assert "comment" not in packed.text()


def test_two_users_on_one_node_share_nothing(site: Site, alice: Home) -> None:
    bob = _home(site, "bob")
    jobs = [home.submit("two", "exec almanac-pack --items 0-1 -- waiting", "-w", "n1") for home in (alice, bob)]
    for job in jobs:
        job.wait_until_ready()
    folders = [job.on_nodes("stat -c '%U %a %n' /tmp/almanac-pack-$1-*").split() for job in jobs]
    assert [each[:2] for each in folders] == [["alice", "700"], ["bob", "700"]]
    for other, folder in (("bob", folders[0][2]), ("alice", folders[1][2])):
        assert site.run("n1", other, "ls", folder, check=False).rc != 0
    for job, folder in zip(jobs, folders, strict=True):
        pipes = {line.split("\t")[1] for line in job.text("calls").splitlines()}
        assert pipes == {f"{folder[2]}/gpu0/pipe"}
    site.run("login", "alice", "scancel", str(jobs[0].id))
    jobs[0].ended("CANCELLED", "[0-9]+:[0-9]+")
    assert jobs[1].on_nodes("ls -d /tmp/almanac-pack-$1-*").split() == [folders[1][2]]
    site.run("login", "bob", "scancel", str(jobs[1].id))
    jobs[1].ended("CANCELLED", "[0-9]+:[0-9]+")
