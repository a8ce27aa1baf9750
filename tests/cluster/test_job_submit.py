"""job_submit.lua inside a real slurmctld: what it sets, what it never does, and that nothing stops a submission."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from advice_files import TEXT, advice, family, hook_on, publish, uid_of
from processes import wait_until
from sites import Site

from slurm_hooks.advice.file import AdviceRow

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

ROOT = Path(__file__).resolve().parents[2]
NODES = "n[1-4]"
LINE = re.compile(
    r"\[[\dT:.-]+\] lua: almanac: (?P<done>set|kept|observe) site_factor=(?P<site_factor>\d+) uid=(?P<uid>\d+) "
    r"gpus=(?P<gpus>\d+) row=(?P<row>[FGU]) advice=(?P<advice>[\w.-]+) us=\d+ key=(?P<key>[!-~]{1,64})"
)
BERT = family("train-bert-#", 4, 6397, bound_mib=25395, tier="hbm40g", gains="hbm80g=40 min", text=TEXT)
SITE_ROWS = (AdviceRow("G", 2400, 8189, gpus=4), AdviceRow("U", 3000, 0))


@pytest.fixture
def busy(site: Site) -> Iterator[Site]:
    """A site whose jobs stay pending, as if every node were taken."""
    site.run("ctl", "root", "scontrol", "update", f"nodename={NODES}", "state=drain", "reason=test")
    try:
        yield site
    finally:
        site.run("ctl", "root", "scancel", "--user=alice")
        site.run("ctl", "root", "scontrol", "update", f"nodename={NODES}", "state=resume", check=False)
        site.wait_for_nodes()


def submit(site: Site, *options: str, user: str = "alice", name: str = "train-BERT-7", gpus: str = "--gpus=4") -> int:
    return site.sbatch(user, "-J", name, gpus, *options)


def site_factor_of(site: Site, job: int | str) -> int:
    """The pending job's site factor."""
    shown: list[str] = []

    def is_there() -> bool:
        shown[:] = site.run("ctl", "root", "sprio", "-h", "-j", str(job), "-o", "%S").stdout.split()
        return bool(shown) and all(map(str.isdecimal, shown))

    wait_until(f"sprio to show job {job}", is_there)
    return int(shown[0])


def logged(site: Site, since: int = 0) -> list[dict[str, str]]:
    """Our lines of slurmctld's log, each wholly as it has to be."""
    lines = [line for line in site.controller_log()[since:].split("\n") if "] lua: almanac:" in line]
    matches = [LINE.fullmatch(line) for line in lines]
    assert [line for line, match in zip(lines, matches, strict=True) if not match] == []
    return [match.groupdict() for match in matches if match]


def test_apply_sets_the_site_factor_and_nothing_else(busy: Site) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT))
    plain = busy.job(submit(busy))
    hook_on(busy)
    job = submit(busy)
    assert site_factor_of(busy, job) == 6397
    found = busy.job(job)
    differs = {key for key in plain if plain[key] != found.get(key) and not key.endswith("Time")}
    assert differs <= {"JobId", "Priority", "Reason", "LastSchedEval", "Scheduler", "AllocNode:Sid"}
    assert "Held" not in found["Reason"]  # else it says what the scheduler has looked at by now


@pytest.mark.parametrize(("mode", "expected"), [("observe", 1), ("off", 0)])
def test_observe_only_writes_to_the_log_and_off_does_nothing(busy: Site, mode: str, expected: int) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT, mode=mode))
    hook_on(busy)
    since = len(busy.controller_log())
    assert site_factor_of(busy, submit(busy)) == 0
    lines = logged(busy, since)
    assert len(lines) == expected
    for line in lines:
        uid = uid_of(busy, "alice")
        expect = {"done": "observe", "site_factor": "6397", "uid": uid, "gpus": "4", "row": "F", "advice": "v1"}
        assert line == {**expect, "key": "train-bert-#"}


# "ctl" side commands that break the file at $1; "" leaves it as it is.
FAULTS = {
    "missing": 'rm "$1"',
    "cut off": 'truncate -s 200 "$1"',
    "50 MB": 'head -c 50000000 /dev/zero | tr "\\\\0" "x" >"$1"',
    "unreadable": 'chown root:root "$1"; chmod 600 "$1"',
    "a folder": 'rm "$1"; mkdir "$1"',
    "a link to itself": 'rm "$1"; ln -s "$1" "$1"',
    "Lua code": """printf 'os.execute("touch /tmp/almanac-was-here")\\n' >"$1" """,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_is_of_no_use_changes_nothing(busy: Site, fault: str) -> None:
    path = publish(busy, uid_of(busy, "alice"), advice(BERT))
    hook_on(busy)
    assert site_factor_of(busy, submit(busy)) == 6397
    busy.run("ctl", "root", "sh", "-c", FAULTS[fault], "sh", path)
    done = busy.run("login", "alice", "sbatch", "-J", "train-bert-1", "--gpus=4", "-o/dev/null", "--wrap=true")
    assert re.fullmatch(r"Submitted batch job \d+\n", done.stdout) and done.stderr == ""
    assert site_factor_of(busy, done.stdout.split()[-1]) == 0
    site_path = publish(busy, "_site", advice(*SITE_ROWS))
    assert site_factor_of(busy, submit(busy)) == 8189
    busy.run("ctl", "root", "sh", "-c", FAULTS[fault], "sh", site_path)
    assert site_factor_of(busy, submit(busy)) == 0
    assert busy.run("ctl", "root", "test", "-e", "/tmp/almanac-was-here", check=False).rc == 1


WRITER = """
import os, sys, time
path, how, *texts = sys.argv[1:]
ends = time.monotonic() + 600
texts = [open(text, "rb").read() for text in texts]
while time.monotonic() < ends and not os.path.exists(path + ".stop"):
    for text in texts:
        name = path if how == "in place" else path + ".new"
        with open(name, "wb", buffering=0) as file:
            for start in range(0, len(text), 1000):
                file.write(text[start:start + 1000])
        os.chmod(name, 0o644)
        if how == "rename":
            os.rename(name, path)
"""


@pytest.mark.parametrize("how", ["rename", "in place"])
def test_a_file_that_is_written_while_it_is_read(busy: Site, how: str) -> None:
    """By renaming, one of the two files is read, whole; in place, half a file is none."""
    filler = [family(f"k{number:04d}", 1, 1, text="x" * 100) for number in range(300)]
    path = publish(busy, uid_of(busy, "alice"), advice(*filler, BERT))
    texts = [
        publish(busy, f"text{factor}", advice(*filler, family("train-bert-#", 4, factor))) for factor in (1000, 2000)
    ]
    hook_on(busy)
    argv = busy.command("ctl", "root", ["python3", "-c", WRITER, path, how, *texts])
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as writer:
        try:
            time.sleep(0.5)
            factors = {site_factor_of(busy, job) for job in [submit(busy) for _ in range(25)]}
            assert writer.poll() is None
        finally:
            busy.write("ctl", f"{path}.stop", b"")
    assert factors <= ({1000, 2000} if how == "rename" else {0, 1000, 2000})


BROKEN_MODULES = {
    "missing": None,
    "empty": b"",
    "not Lua": b"local = 5 end end\n",
    "raising as it loads": b'error("no")\n',
    "raising no text": b"error({})\n",
    "returning nothing": b"local x = 1\n",
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("module", ["job_submit.lua", "submission.lua", "almanac.lua"])
def test_a_broken_module_stops_nothing_and_a_mended_one_counts_at_once(busy: Site, module: str) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT))
    hook_on(busy)
    path = f"{busy.lua_dir}/{module}"
    whole = busy.read("ctl", path)
    for what, data in BROKEN_MODULES.items():
        busy.remove("ctl", path)
        if data is not None:
            busy.write("ctl", path, data)
        assert site_factor_of(busy, submit(busy)) == 0, what
        busy.write("ctl", path, whole)
        assert site_factor_of(busy, submit(busy)) == 6397, what


def test_a_factor_of_the_sites_own_script_is_kept(busy: Site) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT))
    hook_on(busy, before="    job_desc.site_factor = 77")
    since = len(busy.controller_log())
    assert site_factor_of(busy, submit(busy)) == 77
    assert [line["done"] for line in logged(busy, since)] == ["kept"]


def test_the_user_is_told_unless_the_job_asks_for_the_tier_already(busy: Site) -> None:
    publish(busy, uid_of(busy, "alice"), advice(BERT, tell=True))
    hook_on(busy)

    def said(*options: str) -> str:
        command = ("sbatch", "-J", "train-bert-1", "--gpus=4", "-o/dev/null", *options, "--wrap=true")
        return busy.run("login", "alice", *command).stderr

    assert f"almanac: hbm40g is enough: {TEXT} It starts about 40 min earlier" in said()
    assert "almanac" in said("-C", "gpu&hbm80g")
    assert said("-C", "gpu&hbm40g") == ""
    assert said("-J", "another") == ""
