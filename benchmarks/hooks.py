"""Cost of the hooks on a real Slurm: a submission with and without them, the time inside slurmctld, each fault.

Run as root: python benchmarks/hooks.py (in `make bench-hooks`). ALMANAC_SITES="native,24.11" chooses the sites, as for
the cluster tests; ALMANAC_BENCH_SUBMISSIONS=100 makes it shorter than the 500 of each kind that the goals are for.

Jobs stay held, so that only submitting is timed. Submissions of the kinds that are compared take turns in blocks of
five, so that what the machine does meanwhile meets all of them alike. Times of sbatch are wall clock on the login host;
the benchmark's own line in the log is part of both sides. Those of the guarded line, loading its modules included, are
os.clock() in Lua: processor time of all of slurmctld's threads, so never less than the line's own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from figures import Figure, at_most, main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/cluster"))

from advice_files import advice, family, guarded_line, publish, shown_advice, uid_of  # noqa: E402
from front_end import FrontEnd  # noqa: E402
from lab import SlurmLab  # noqa: E402
from native_site import NativeSite  # noqa: E402
from sites import Site  # noqa: E402

from slurm_hooks.advice.file import AdviceRow  # noqa: E402
from slurm_hooks.advice.sched import MAX_BYTES  # noqa: E402

SUBMISSIONS = int(os.environ.get("ALMANAC_BENCH_SUBMISSIONS", "500"))
USERS, FAMILIES, OF_EACH_FAULT, OF_WRAPPER = 5000, 50, 40, 60
PER_RUN, PAUSE_S = 100, 0.02
JOB_SUBMIT = """
function slurm_job_submit(job_desc, part_list, submit_uid)
    local began, is_on = os.clock(), job_desc.name ~= "off"
    if is_on then
        %s
    end
    slurm.log_info("BENCH %%s us=%%d", is_on and "on" or "off", (os.clock() - began) * 1e6)
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
CLI_FILTER = """
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, pack_offset)
    if os.getenv("BENCH_FILTER") then
        pcall(function() dofile("%s/cli_filter.lua").pre_submit(options, pack_offset) end)
    end
    return slurm.SUCCESS
end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
return slurm.SUCCESS
"""
# Seconds of each run of each kind, in turns; of a kind with a terminal, on a new one.
LOOP = """
import json, os, pty, subprocess, sys, time
kinds, count, block, pause_s = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
seconds = [[] for _ in kinds]
def run(kind):
    time.sleep(pause_s)
    environment = {**os.environ, **kind["env"]}
    began = time.perf_counter()
    if kind["tty"]:
        pid, fd = pty.fork()
        if pid == 0:
            os.execvpe(kind["argv"][0], kind["argv"], environment)
        try:
            while os.read(fd, 4096):
                pass
        except OSError:
            pass
        status = os.waitpid(pid, 0)[1]
        os.close(fd)
    else:
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        status = subprocess.run(kind["argv"], env=environment, **quiet).returncode
    if status != 0:
        sys.exit("failed: " + repr(kind))
    return time.perf_counter() - began
for start in range(0, count, block):
    for turn in range(len(kinds)):
        index = (start // block + turn) % len(kinds)
        seconds[index] += [run(kinds[index]) for _ in range(block)]
print(json.dumps(seconds))
"""
COPIES = """
import shutil, sys
for uid in range(int(sys.argv[2])):
    shutil.copy2(sys.argv[1], sys.argv[1].rpartition("/")[0] + "/" + str(1_000_000 + uid))
"""
FAULTS = {
    "file missing": 'rm "$1"',
    "file empty": ': >"$1"',
    "file cut off": 'truncate -s 5000 "$1"',
    "file of garbage": 'head -c 60000 /dev/urandom >"$1"',
    "file expired": r'sed -i "s/^expires.*/expires\t1000/" "$1"',
    "file of another format": 'sed -i "1s/1/2/" "$1"',
    "file of 50 MB": 'head -c 50000000 /dev/zero >"$1"',
    "largest file, last line broken": f'head -c {MAX_BYTES} "$1" >"$1.x"; mv "$1.x" "$1"',
    "file unreadable": 'chown root:root "$1"; chmod 600 "$1"',
    "file a folder": 'rm "$1"; mkdir "$1"',
}


@dataclass(frozen=True)
class Kind:
    """One way to submit: the program in place of sbatch, the job's name ("off": past the hook), the environment."""

    program: Sequence[str] = ("sbatch",)
    name: str = "family-7"
    env: dict[str, str] = field(default_factory=dict)
    tty: bool = False

    @property
    def call(self) -> dict[str, object]:
        argv = [*self.program, "-H", "--gpus=4", f"-J{self.name}", "-o/dev/null", "--wrap=true"]
        return {"argv": argv, "env": self.env, "tty": self.tty}


OFF, ON = Kind(name="off"), Kind()


def compare(
    site: Site, *kinds: Kind, count: int, block: int = 5, pause_s: float = 0
) -> tuple[list[list[float]], list[int]]:
    """Seconds of `count` submissions of each kind, and the guarded line's microseconds of those that met it."""
    seconds: list[list[float]] = [[] for _ in kinds]
    since = len(site.controller_log())
    for start in range(0, count, PER_RUN):
        calls = json.dumps([kind.call for kind in kinds])
        argv = ("python3", "-c", LOOP, calls, str(min(PER_RUN, count - start)), str(block), str(pause_s))
        found = json.loads(site.run("login", "alice", *argv, timeout_s=600).stdout)
        for one, more in zip(seconds, found, strict=True):
            one += more
        site.run("ctl", "root", "scancel", "--user=alice", "--state=PENDING", "--quiet")
        time.sleep(1)  # slurmctld has to do with that for a while, and os.clock() would count it
    return seconds, [int(us) for us in re.findall(r"BENCH on us=(\d+)", site.controller_log()[since:])]


def publish_all(site: Site) -> str:
    """A file of 50 families for each of 5,000 users and for alice, whose path is returned; and `_site`."""
    text = "your last 14 runs of it peaked at 21.3 GiB per GPU; about 1 in 100 such jobs needs more than 24.8 GiB."
    names = [f"family-{chr(97 + number % 26)}{number // 26}" for number in range(FAMILIES - 1)]
    names.append("family-#")
    rows = [family(name, 4, 5000, bound_mib=25395, tier="hbm40g", waits="hbm40g=1 h", text=text) for name in names]
    publish(site, "_site", advice(AdviceRow("G", 2400, 8189, gpus=4), AdviceRow("U", 3000, 0), lasts_s=86_400))
    path = publish(site, uid_of(site, "alice"), advice(*rows, lasts_s=86_400))
    site.run("ctl", "root", "python3", "-c", COPIES, path, str(USERS))
    return path


def submissions(site: Site) -> Iterator[Figure]:
    kinds = {"job_submit": ON}
    if site.run("login", "root", "test", "-f", f"{site.lua_dir}/cli_filter.lua", check=False).rc == 0:
        kinds["job_submit and cli_filter"] = Kind(env={"BENCH_FILTER": "1"})
    (off, *others), _ = compare(site, OFF, *kinds.values(), count=SUBMISSIONS)
    release = site.release
    yield Figure(f"{release}: sbatch without hooks, median of {len(off)}, ms", statistics.median(off) * 1000)
    for what, seconds in zip(kinds, others, strict=True):
        ratio = statistics.median(seconds) / statistics.median(off)
        yield at_most(f"{release}: sbatch with {what}, median of {len(seconds)}, times", ratio, 1.05)
    for name, what in (("family-7", "the file read last"), ("stranger", "the user's file and _site checked again")):
        # os.clock() counts what other threads still do with the submission before.
        _, line_us = compare(site, Kind(name=name), count=SUBMISSIONS, pause_s=PAUSE_S)
        line = f"{release}: guarded line, {USERS} users published, {what}"
        yield Figure(f"{line}, median, us", statistics.median(line_us))
        yield p99(f"{line}, p99", line_us)


def p99(name: str, line_us: Sequence[int]) -> Figure:
    value = statistics.quantiles(line_us, n=100)[98]
    return at_most(f"{name} of {len(line_us)}, us", value, 1000)


def largest_file(site: Site) -> Iterator[Figure]:
    """A user with as many families as a file can hold."""
    rows = [family(f"f{number:03d}", 4, 1, text="x" * 150) for number in range(330)]
    path = publish(site, uid_of(site, "alice"), advice(*rows, family("family-#", 4, 1), lasts_s=86_400))
    _, line_us = compare(site, ON, count=PER_RUN)
    size, median_us = len(site.read("ctl", path)), statistics.median(line_us)
    yield Figure(f"{site.release}: guarded line, a file of {size} bytes, median of {len(line_us)}, us", median_us)


def faults(site: Site, path: str) -> Iterator[Figure]:
    """Return the extra time of sbatch with the hook: the median of the differences of neighbors."""
    whole = site.read("ctl", path)
    for fault, command in FAULTS.items():
        if fault.startswith("largest"):
            site.write("ctl", path, whole[:-1] * 10)
        site.run("ctl", "root", "sh", "-c", command, "sh", path)
        yield fault_figure(site, fault)
        site.remove("ctl", path)
        publish(site, path.rpartition("/")[2], whole)
    for module in ("almanac.lua", "job_submit.lua"):
        name = f"{site.lua_dir}/{module}"
        kept = site.read("ctl", name)
        for fault, data in (("missing", None), ("broken", b"local = end\n")):
            site.remove("ctl", name)
            if data is not None:
                site.write("ctl", name, data)
            yield fault_figure(site, f"{module} {fault}")
        site.write("ctl", name, kept)


def fault_figure(site: Site, fault: str) -> Figure:
    (off, on), _ = compare(site, OFF, ON, count=OF_EACH_FAULT, block=1)
    more_ms = statistics.median(b - a for a, b in zip(off, on, strict=True)) * 1000
    return Figure(f"{site.release}: {fault}: sbatch longer by, median of {len(on)}, ms", more_ms, "< 5", more_ms < 5)


def wrapper(site: Site) -> Iterator[Figure]:
    """Measure sbatch-almanac and cli_filter's prompt against sbatch, past job_submit; a file of 51 families."""
    front = FrontEnd(site)
    front.publish(
        shown_advice(*(family(f"f{number}", 4, 1) for number in range(FAMILIES)), family("off", 4, 1), prompt="show")
    )
    for tty in (False, True):
        kinds = Kind(name="off", tty=tty), Kind((front.wrapper,), "off", front.env, tty)
        (plain, wrapped), _ = compare(site, *kinds, count=OF_WRAPPER)
        more_ms = (statistics.median(wrapped) - statistics.median(plain)) * 1000
        where = "on a terminal" if tty else "without a terminal"
        yield at_most(f"{site.release}: sbatch-almanac over sbatch {where}, ms", more_ms, 80)
    front.filter_on()
    kinds = Kind(name="off", env={"ALMANAC_ADVICE": "off"}, tty=True), Kind(name="off", tty=True)
    (plain, asked), _ = compare(site, *kinds, count=OF_WRAPPER)
    more_ms = (statistics.median(asked) - statistics.median(plain)) * 1000
    yield at_most(f"{site.release}: cli_filter's prompt over sbatch on a terminal, ms", more_ms, 80)


def running(name: str) -> Iterator[Site]:
    if name != "native":
        from docker_site import DockerSite

        with DockerSite(name) as site:
            yield site
        return
    root = Path(tempfile.mkdtemp(prefix="almanac-bench-", dir="/var/tmp"))
    try:
        with SlurmLab(root) as lab:
            yield NativeSite(lab)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def measure(site: Site) -> Iterator[Figure]:
    site.reset()
    path = publish_all(site)
    site.hook("job_submit", JOB_SUBMIT % guarded_line(site))
    site.hook("cli_filter", CLI_FILTER % site.lua_dir)
    yield from submissions(site)
    yield from faults(site, path)
    yield from largest_file(site)
    yield from wrapper(site)
    site.reset()


def measure_all() -> Iterator[Figure]:
    for name in os.environ.get("ALMANAC_SITES", "native").split(","):
        for site in running(name):
            yield from measure(site)


if __name__ == "__main__":
    main(measure_all)
