"""What the hooks cost on a real Slurm: a submission with and without them, the time inside slurmctld, each fault.

Run as root: python benchmarks/hooks.py (in `make bench-hooks`). ALMANAC_SITES="native,24.11" chooses the sites, as for
the cluster tests; ALMANAC_BENCH_SUBMISSIONS=100 makes it shorter than the 500 of each kind that the goals are for.

Jobs stay held, so that only submitting is timed. Times of sbatch are wall clock on the login host. Times inside
slurmctld are of two kinds: the guarded line, loading its module included, by os.clock() in Lua (processor time of all
of slurmctld's threads: never less than the line's own), and slurmctld's own measure of the whole request (usec=).
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from figures import Figure, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/cluster"))

from advice_files import advice, family, guarded_line, publish, uid_of
from lab import SlurmLab
from native_site import NativeSite
from sites import Site

from slurm_hooks.advice_file import MAX_BYTES, Row

SUBMISSIONS = int(os.environ.get("ALMANAC_BENCH_SUBMISSIONS", "500"))
USERS, FAMILIES, BLOCK, OF_EACH_FAULT = 5000, 50, 25, 25
TIMED = """
function slurm_job_submit(job_desc, part_list, submit_uid)
    local began = os.clock()
    %s
    slurm.log_info("BENCH us=%%d", (os.clock() - began) * 1e6)
    return slurm.SUCCESS
end
function slurm_job_modify(job_desc, job_rec, part_list, modify_uid) return slurm.SUCCESS end
return slurm.SUCCESS
"""
FILTER = """
function slurm_cli_setup_defaults(options, early_pass) return slurm.SUCCESS end
function slurm_cli_pre_submit(options, pack_offset)
    pcall(function() dofile("%s/cli_filter.lua").pre_submit(options, pack_offset) end)
    return slurm.SUCCESS
end
function slurm_cli_post_submit(offset, job_id, step_id) return slurm.SUCCESS end
return slurm.SUCCESS
"""
# Seconds of each of n runs, on a terminal of its own or without one; %% in an argument is the run's number.
LOOP = """
import os, pty, subprocess, sys, time
tty, first, n, *argv = sys.argv[1:]
for number in range(int(first), int(first) + int(n)):
    words = [word.replace("%%", str(number)) for word in argv]
    began = time.perf_counter()
    if tty == "tty":
        pid, fd = pty.fork()
        if pid == 0:
            os.execvp(words[0], words)
        try:
            while os.read(fd, 4096):
                pass
        except OSError:
            pass
        status = os.waitpid(pid, 0)[1]
        os.close(fd)
    else:
        status = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode
    print(time.perf_counter() - began if status == 0 else "failed")
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
    "file with a broken last line": f'head -c {MAX_BYTES - 100} "$1" >"$1.x"; mv "$1.x" "$1"',
    "file unreadable": 'chown root:root "$1"; chmod 600 "$1"',
    "file a folder": 'rm "$1"; mkdir "$1"',
}


def run_loop(site: Site, argv: Sequence[str], count: int, tty: bool = False, **env: str) -> list[float]:
    """Seconds of each run as alice on the login host. Raises RuntimeError where one of them fails."""
    numbers = ("tty" if tty else "plain", str(next(_FIRST)), str(count))
    done = site.run("login", "alice", "python3", "-c", LOOP, *numbers, *argv, env=env, timeout_s=600)
    if "failed" in done.stdout:
        raise RuntimeError(f"{argv}: failed\n{done.stderr[-2000:]}")
    return [float(line) for line in done.stdout.split()]


_FIRST = itertools.count(0, 1000)
SUBMIT = ("--parsable", "-H", "--gpus=4", "-Jfamily-%%", "-o/dev/null", "--wrap=true")


def clear(site: Site) -> None:
    site.run("ctl", "root", "scancel", "--user=alice", "--state=PENDING", "--quiet")


class Hooks:
    """The site with the hooks on or off, and what slurmctld has logged of it."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.has_filter = site.run("login", "root", "test", "-f", f"{site.lua_dir}/cli_filter.lua", check=False).rc == 0

    def use(self, job_submit: bool, cli_filter: bool = False) -> None:
        self.site.hook("job_submit", TIMED % (guarded_line(self.site) if job_submit else ""))
        self.site.hook("cli_filter", FILTER % self.site.lua_dir if cli_filter else None)

    def measure(self, count: int) -> tuple[list[float], list[int], list[int]]:
        """Of `count` submissions: sbatch's seconds, the line's microseconds, the requests' microseconds."""
        since = len(self.site.controller_log())
        seconds = run_loop(self.site, ["sbatch", *SUBMIT], count)
        log = self.site.controller_log()[since:]
        clear(self.site)
        line_us = [int(us) for us in re.findall(r"BENCH us=(\d+)", log)]
        request_us = [int(us) for us in re.findall(r"_slurm_rpc_submit_batch_job.*usec=(\d+)", log)]
        return seconds, line_us, request_us


def publish_all(site: Site) -> str:
    """A file of 50 families for each of 5,000 users and for alice, whose path is returned; and `_site`."""
    text = "your last 14 runs of it peaked at 21.3 GiB per GPU; of 100 jobs with evidence like this, at most about 1 exceeds"
    names = [f"family-{chr(97 + number % 26)}{number // 26}" for number in range(FAMILIES - 1)]
    rows = [family(name, 4, 5000, bound_mib=25395, tier="hbm40g", waits="hbm40g=1 h", text=text) for name in names]
    data = advice(*rows, family("family-#", 4, 6397, bound_mib=25395, tier="hbm40g", text=text), lasts_s=86_400)
    publish(site, "_site", advice(Row("G", 2400, 8189, gpus=4), Row("U", 3000, 0), lasts_s=86_400))
    path = publish(site, uid_of(site, "alice"), data)
    site.run("ctl", "root", "python3", "-c", COPIES, path, str(USERS))
    return path


def submissions(hooks: Hooks) -> Iterator[Figure]:
    """Alternating blocks, so that what the machine does meanwhile meets all of them alike."""
    kinds = {"off": (False, False), "job_submit": (True, False)}
    if hooks.has_filter:
        kinds["both"] = (True, True)
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    requests: dict[str, list[int]] = {kind: [] for kind in kinds}
    line_us: list[int] = []
    for block in range(-(-SUBMISSIONS // BLOCK)):
        order = list(kinds)
        for kind in order[block % len(order) :] + order[: block % len(order)]:
            hooks.use(*kinds[kind])
            wall, line, request = hooks.measure(BLOCK)
            seconds[kind] += wall
            requests[kind] += request
            line_us += line if kind != "off" else []
    off = statistics.median(seconds["off"])
    release, count = hooks.site.release, len(seconds["off"])
    yield Figure(f"{release}: sbatch without hooks, median of {count}, ms", off * 1000)
    for kind in list(kinds)[1:]:
        what = "job_submit" if kind == "job_submit" else "job_submit and cli_filter"
        ratio = statistics.median(seconds[kind]) / off
        goal = "<= 1.05"
        yield Figure(f"{release}: sbatch with {what}, median of {count}, times", ratio, goal, ratio <= 1.05)
    p99 = quantile(line_us, 0.99)
    yield Figure(
        f"{release}: guarded line in slurmctld, {USERS} users published, median, us", statistics.median(line_us)
    )
    yield Figure(
        f"{release}: guarded line in slurmctld, {USERS} users published, p99 of {len(line_us)}, us",
        p99,
        "<= 1000",
        p99 <= 1000,
    )
    extra_us = statistics.median(requests["job_submit"]) - statistics.median(requests["off"])
    yield Figure(f"{release}: request in slurmctld, more with job_submit, median, us", extra_us)


def quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def faults(hooks: Hooks, path: str) -> Iterator[Figure]:
    """How much longer a request takes inside slurmctld than without the hook."""
    site = hooks.site
    hooks.use(False)
    _, _, plain = hooks.measure(2 * OF_EACH_FAULT)
    off_us = statistics.median(plain)
    whole = site.read("ctl", path)
    hooks.use(True)
    for fault, command in FAULTS.items():
        site.run("ctl", "root", "sh", "-c", command, "sh", path)
        yield fault_figure(hooks, fault, off_us)
        site.remove("ctl", path)
        publish(site, path.rpartition("/")[2], whole)
    for module in ("almanac.lua", "job_submit.lua"):
        name = f"{site.lua_dir}/{module}"
        kept = site.read("ctl", name)
        for fault, data in (("missing", None), ("broken", b"local = end\n")):
            site.remove("ctl", name)
            if data is not None:
                site.write("ctl", name, data)
            yield fault_figure(hooks, f"{module} {fault}", off_us)
        site.write("ctl", name, kept)


def fault_figure(hooks: Hooks, fault: str, off_us: float) -> Figure:
    _, _, request_us = hooks.measure(OF_EACH_FAULT)
    more_ms = (statistics.median(request_us) - off_us) / 1000
    name = f"{hooks.site.release}: {fault}: more per submission, median of {len(request_us)}, ms"
    return Figure(name, round(more_ms, 3), "< 5", more_ms < 5)


def wrapper(hooks: Hooks) -> Iterator[Figure]:
    """sbatch-almanac against sbatch, in turns, with and without a terminal."""
    site = hooks.site
    argv = wrapper_argv(site)
    if argv is None:
        return
    hooks.use(False)
    config = f"{site.etc_dir}/bench.toml"
    site.write("login", config, f'[hooks]\nadvice_dir = "{site.advice_dir}"\n'.encode())
    uid = uid_of(site, "alice")
    shown = f"{site.advice_dir}/user/{uid}"
    site.run("login", "root", "install", "-d", "-o", "alice", "-m", "0755", shown)
    site.write(
        "login", f"{shown}/advice", advice(family("family-#", 4, 6397), prompt="show"), owner="alice", mode=0o400
    )
    for tty in (False, True):
        plain: list[float] = []
        wrapped: list[float] = []
        for _ in range(8):
            plain += run_loop(site, ["sbatch", *SUBMIT[1:]], 10, tty)
            wrapped += run_loop(site, [*argv, *SUBMIT[1:]], 10, tty, ALMANAC_CONFIG=config)
            clear(site)
        more_ms = (statistics.median(wrapped) - statistics.median(plain)) * 1000
        where = "on a terminal" if tty else "without a terminal"
        yield Figure(f"{site.release}: sbatch-almanac over sbatch {where}, ms", more_ms, "<= 80", more_ms <= 80)
    site.remove("login", config)


def wrapper_argv(site: Site) -> list[str] | None:
    """The installed wrapper, or the checkout's where the login host is this one; None where there is none."""
    if isinstance(site, NativeSite):
        script = ROOT / "slurm_hooks/sbatch_almanac.py"
        return [sys.executable, "-I", str(script)] if script.is_file() else None
    is_there = site.run("login", "alice", "which", "sbatch-almanac", check=False).rc == 0
    return ["sbatch-almanac"] if is_there else None


def running(name: str) -> Iterator[Site]:
    if name == "native":
        root = Path(tempfile.mkdtemp(prefix="almanac-bench-", dir="/var/tmp"))
        try:
            with SlurmLab(root) as lab:
                yield NativeSite(lab)
        finally:
            shutil.rmtree(root, ignore_errors=True)
        return
    from docker_site import DockerSite

    with DockerSite(name) as site:
        yield site


def main() -> int:
    figures: list[Figure] = []
    for name in os.environ.get("ALMANAC_SITES", "native").split(","):
        for site in running(name):
            site.reset()
            hooks = Hooks(site)
            path = publish_all(site)
            figures += [*submissions(hooks), *faults(hooks, path), *wrapper(hooks)]
            site.reset()
    return 0 if report("hooks", figures, "hooks on a real Slurm") else 1


if __name__ == "__main__":
    sys.exit(main())
