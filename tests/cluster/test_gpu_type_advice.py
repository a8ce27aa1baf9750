"""Another GPU type that almanac advises, with a real Slurm: what is submitted, and how long it waits."""

from __future__ import annotations

import json
import random
import re
import shlex
import statistics
import time
from collections.abc import Iterator, Sequence

import pytest
from advice_files import shown_advice
from front_end import FrontEnd, ended
from layout import GPUS_PER_NODE
from mig_site import MigSite, mig_site
from processes import wait_until
from site_commands import SiteCommands
from sites import Site

from advisor.types.decide import TypeRunTime, TypeWait
from almanac.records import Duration, JobRequest
from almanac.submit_config import GpuType
from slurm.backend import CommandBackend
from slurm_hooks.advice.kinds import TIMES, WAITS, WaitsFile, times_file
from slurm_hooks.advice.type_files import queue_waits, read_gpu_queue

pytestmark = pytest.mark.cluster

BY_GRES = (GpuType(name="a100", gres="a100"), GpuType(name="h100", gres="h100"))
BY_FEATURE = (GpuType(name="a100", constraint="hbm40g"), GpuType(name="h100", constraint="hbm80g"))
JOB = ("-o", "/dev/null", "-J", "train-BERT-7", "--wrap", "sleep 0")


def publish_types(front: FrontEnd, types: Sequence[GpuType], age_s: int = 0) -> None:
    """alice's jobs take 3 h on a100 and 2 h on h100, where they would wait for 4 h."""
    now_s = int(time.time())
    site, folder = front.site, f"{front.site.advice_dir}/user"
    rows = [
        TypeWait(name, wait_s, wait_s, wait_s, now_s - age_s) for name, wait_s in (("a100", 300.0), ("h100", 14_400.0))
    ]
    waits, told = tuple((16, row) for row in rows), tuple((2, row) for row in rows)
    site.run("login", "root", "install", "-d", "-m", "0711", f"{folder}/_site")
    file = WaitsFile(now_s - age_s, tuple(types), waits, told)
    site.write("login", f"{folder}/_site/waits", WAITS.render(file), mode=0o444)
    times = (
        TypeRunTime("a100", 10_800.0, 10_000.0, 11_500.0, 14_000.0, 9, "own runs"),
        TypeRunTime("h100", 7_200.0, 6_500.0, 8_000.0, 9_000.0, 2, "own rates"),
    )
    families = {("train-bert-#", gpus): times for gpus in (1, 2, 4, 8)}
    site.write(
        "login",
        f"{folder}/{front.uid}/times",
        TIMES.render(times_file(now_s, now_s + 3600, families)),
        owner="alice",
        mode=0o400,
    )


@pytest.fixture(params=["filter", "wrapper"])
def way(request: pytest.FixtureRequest, site: Site) -> Iterator[tuple[FrontEnd, str]]:
    """alice's terminal, and how she calls sbatch. No memory advice stands in the way."""
    front = FrontEnd(site)
    front.publish(shown_advice(prompt="ask"))
    if request.param == "filter":
        front.filter_on()
    yield front, "sbatch" if request.param == "filter" else front.wrapper
    front.forget()
    site.remove("login", f"{site.advice_dir}/user/_site/waits")


def asked(site: Site, said: str) -> str:
    """Return the request of the job that sbatch names as submitted, by any option."""
    shown = site.job(re.findall(r"Submitted batch job (\d+)", said)[-1])
    names = ("TresPerJob", "TresPerNode", "TresPerTask", "Features")
    return " ".join(f"{name}={shown[name]}" for name in names if name in shown)


FEATURES = [
    ("--gpus=2 -C hbm80g", "Features=hbm40g"),
    ("--gpus=2 -C gpu&hbm80g", "Features=gpu&hbm40g"),
    ("--gpus=2 -C hbm40g", "Features=hbm40g"),
    ("--gpus=3 -C hbm80g", "Features=hbm80g"),  # no run time of this size is known
    ("--gpus=2 -C hbm80g -t 3:50:00", "Features=hbm80g"),  # some runs take longer on the other type
    ("--gpus=2 -C hbm80g -t 4:00:00", "Features=hbm40g"),
    ("--gres=gpu:4 -N2 -C hbm40g|hbm80g", "Features=[hbm40g|hbm80g]"),
    ("--gres=gpu:4 -N2 -C [hbm40g|hbm80g]", "Features=[hbm40g|hbm80g]"),
]


@pytest.mark.parametrize(("typed", "expected"), FEATURES)
def test_a_constraint_is_rewritten_to_the_type_that_ends_first(
    site: Site, way: tuple[FrontEnd, str], typed: str, expected: str
) -> None:
    front, sbatch = way
    publish_types(front, BY_FEATURE)
    done = front.run(sbatch, *JOB[:4], *typed.split(), *JOB[4:], ALMANAC_ADVICE="apply")
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    found = asked(site, said)
    assert found.endswith(expected), found
    site.wait_for(int(said.split()[-1]), "COMPLETED")


def test_what_is_shown_at_a_terminal_and_nothing_with_old_waits(site: Site, way: tuple[FrontEnd, str]) -> None:
    front, sbatch = way
    publish_types(front, BY_FEATURE)
    shell = front.terminal(sbatch, "--gpus=2", "-C", "hbm80g", *JOB)
    shell.expect_exact("for this job: ")
    assert str(shell.before + shell.after).replace("\r\n", "\n") == (
        "almanac: Your runs take 3 h on a100 (9 runs), about 2 h on h100 (2 runs). Wait\n"
        "         now: 5 min and 4 h. a100 ends 2 h 55 min earlier.\n"
        '         Submit with -C "hbm40g" instead?\n'
        "         [y]es, [N]o, [a]lways, or ne[v]er for this job: "
    )
    shell.sendline("y")
    assert asked(site, ended(shell)).endswith("Features=hbm40g")
    front.forget()
    publish_types(front, BY_FEATURE, age_s=601)
    shown = ended(front.terminal(sbatch, "--gpus=2", "-C", "hbm80g", *JOB))
    assert "almanac" not in shown
    assert asked(site, shown).endswith("Features=hbm80g")


@pytest.fixture(scope="module")
def typed_site(_running_site: Site) -> Iterator[MigSite]:
    """n1 has h100s, the other nodes a100s."""
    with mig_site(_running_site, ("n1",)) as made:
        made.drain("n1")
        conf = made.site.read("n1", made.gres_conf("n1")).decode()
        made.site.write("n1", made.gres_conf("n1"), conf.replace("a100", "h100").encode())
        made.take("n1", f"gpu:h100:{GPUS_PER_NODE}")
        made.resume("n1")
        yield made


TYPED = [
    ("--gres=gpu:h100:2", "gpu:a100:2"),
    ("--gpus=h100:2", "gpu:a100:2"),
    ("--gpus-per-node=h100:2", "gpu:a100:2"),
    ("--gres=gpu:a100:2", "gpu:a100:2"),
]


@pytest.mark.every_release
@pytest.mark.parametrize(("typed", "expected"), TYPED)
def test_a_gres_type_is_rewritten_and_the_job_runs_there(
    typed_site: MigSite, site: Site, way: tuple[FrontEnd, str], typed: str, expected: str
) -> None:
    front, sbatch = way
    publish_types(front, BY_GRES)
    done = front.run(sbatch, *JOB[:4], *shlex.split(typed), *JOB[4:], ALMANAC_ADVICE="apply")
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    assert expected in asked(site, said).replace("gres/", "").replace("gres:", "")
    job = int(said.split()[-1])
    site.wait_for(job, "COMPLETED")
    site.wait_for_accounting(job)
    tres = site.run("ctl", "root", "sacct", "-nPX", "-o", "AllocTRES", "-j", str(job)).stdout
    assert "gres/gpu:a100=2" in tres


NUMBER_OF_JOBS = 60


def test_waits_of_jobs_against_what_then_happened(site: Site) -> None:
    """The wait that is estimated just before each submission, and the job's own. Run times are known within a third."""
    rng = random.Random(7)
    # What a test before this one left pending would wait here too.
    site.run("ctl", "root", "scancel", "--user=alice")
    wait_until("an empty queue", lambda: not site.run("ctl", "root", "squeue", "-h").stdout.split())

    commands = SiteCommands(site)

    def durations(requests: Sequence[JobRequest]) -> list[Duration | None]:
        guessed = [float(request.job_name.partition("-")[2]) + 1 for request in requests]
        return [Duration(each, each, each, None, "name", 9, each * 0.7, each * 1.5) for each in guessed]

    # Half of the nodes are taken, so that a queue grows however slowly jobs come.
    taken = site.sbatch("bob", "-J", "wait-900", "-w", "n2,n4", "-N2", "--exclusive", script="#!/bin/sh\nsleep 900\n")
    site.wait_for(taken, "RUNNING")
    nodes = CommandBackend(commands).nodes()
    cluster = CommandBackend(commands).cluster()  # type: ignore[arg-type]
    estimates: dict[int, TypeWait] = {}
    for _ in range(NUMBER_OF_JOBS):
        gpus, kind = rng.choice((1, 1, 2, 4)), rng.choice(BY_FEATURE)
        waits = queue_waits(read_gpu_queue(commands, cluster), nodes, durations, BY_FEATURE, int(time.time()))
        wait = next(wait for size, wait in waits if size >= gpus and wait.gpu_type == kind.name)
        run_s = rng.choice((1, 2, 3))
        name = f"wait-{max(1, run_s + rng.choice((-1, 0, 0, 1)))}"
        words = ("-J", name, "-C", kind.constraint, f"--gpus={gpus}", "-N1", "-t", "1", "-o", "/dev/null")
        estimates[site.sbatch("alice", *words, script=f"#!/bin/sh\nsleep {run_s}\n")] = wait
    site.wait_for_accounting(*estimates)
    site.run("ctl", "root", "scancel", str(taken))
    argv = ("sacct", "-nPX", "-o", "JobIDRaw,Submit,Start", "-j", ",".join(map(str, estimates)))
    rows = site.run("ctl", "root", *argv, env={"SLURM_TIME_FORMAT": "%s"}).stdout.split()
    waited = {int(job): int(start) - int(submit) for job, submit, start in (row.split("|") for row in rows)}
    assert waited.keys() == estimates.keys()
    errors = sorted(abs(waited[job] - wait.wait_s) for job, wait in estimates.items())
    inside = sum(wait.low_s - 2 <= waited[job] <= wait.high_s + 2 for job, wait in estimates.items())
    pairs = [(float(waited[job]), wait.wait_s) for job, wait in estimates.items()]
    figures = {
        "jobs": len(errors),
        "median_wait_s": statistics.median(waited.values()),
        "longest_wait_s": max(waited.values()),
        "median_error_s": statistics.median(errors),
        "worst_error_s": errors[-1],
        "inside_interval": inside,
        "rank_correlation": statistics.correlation(*(_ranks(values) for values in zip(*pairs, strict=True))),
    }
    print(json.dumps(figures))
    assert max(waited.values()) > 0
    assert figures["rank_correlation"] > 0.5, figures


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [float(ordered.index(value)) for value in values]
