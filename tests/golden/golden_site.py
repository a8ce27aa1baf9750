"""The site whose outputs are pinned: of a fixed seed, up to a fixed time, with a Slurm that is a script."""

from __future__ import annotations

import dataclasses
import grp
import json
import os
import pwd
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import golden_slurm
import pytest
from click.testing import CliRunner
from one_batch import OneBatch

import cli.main
from almanac.config_file import load_config
from cli.demo import CONFIG
from demo import GeneratedSource, SiteShape
from slurm.sacct import COLUMNS
from telemetry.ingest import IngestResult, ingest
from telemetry.metrics.summary import summarize
from telemetry.store.store import Store

NOW_S = 1_795_003_200
"""Wednesday, 18 November 2026, 12:00 UTC: also that of the site made by hand (tests/reports)."""
DAYS = 13
"""As many as the back-test of node power needs."""
UIDS = {"operator": os.getuid(), "benabel": 60_001, "carlabel": 60_002, "dinaabel": 60_003, "emilabel": 60_004}
OTHER_NODES = """
[[node_sets]]
name = "hbm80g"
nodes = "nid[008193-008200]"
"""
"""Left out of the demo's configuration: one forecast is enough."""
SETTINGS = """
[store]
threads = 1
[advice]
risk = 0.05
[slurm]
bin_dir = "slurm"
backend = "commands"
[hooks]
advice_dir = "advice"
group = "root"
[reports]
own_jobs = 4
[placement]
partitions = ["gpu"]
types = ["hbm40g", "hbm80g"]
[mig]
nodes = ["m1=A100-80"]
slice_type = "a100_{profile}"
include_file = "almanac-mig.conf"
export_command = ["slurm/mig-parted", "export", "{node}"]
[mail]
sender = "almanac@example.org"
recipient = "{user}@example.org"
spool_dir = "ended"
"""

# In the formats of Gavel: steps per second of jobs on two types of GPU, jobs, and steps per second of pairs on one GPU.
SPEEDS = {
    kind: {"('small', 1)": {"null": small}, "('small', 2)": {"null": 2 * small}, "('large', 4)": {"null": large}}
    for kind, small, large in (("h100", 2.0, 8.0), ("a100", 1.0, 1.0))
}
TRACE = "".join(
    f"{kind}\tpython3 train.py\trl\t--steps\t1\t{steps}\t{gpus}\t1\t-1\t{at}\n"
    for kind, steps, gpus, at in (
        ("small", 3600, 1, 0),
        ("small", 3600, 1, 0),
        ("large", 7200, 4, 0),
        ("small", 3600, 2, 600),
    )
)
A, B = "('a', 1)", "('b', 1)"
PAIRS = {"h100": {A: {"null": 10.0, A: [9.0, 9.0], B: [8.0, 1.0]}, B: {"null": 2.0, B: [1.8, 1.8]}}}


def fill(folder: Path) -> None:
    """Build the site: ingested, summarized, and trained. The clock must stand at NOW_S."""
    golden_slurm.install(folder / "slurm", NOW_S, " ".join(COLUMNS))
    settings = CONFIG.replace(OTHER_NODES, "") + SETTINGS
    (folder / "almanac.toml").write_text(settings)
    (folder / "untrained.toml").write_text(f"{settings}[training]\nmin_jobs = 10000\n")  # replays need no trees
    (folder / "jobs.trace").write_text(TRACE)
    (folder / "speeds.json").write_text(json.dumps(SPEEDS))
    (folder / "pairs.json").write_text(json.dumps(PAIRS))
    (folder / "almanac-mig.conf").write_text(f"NodeName=m1 CPUs=64 Gres={golden_slurm.SLICES}\n")
    shape = dataclasses.replace(
        SiteShape.demo(), seed=3, days=DAYS, start_s=NOW_S - DAYS * 86_400, users=6, jobs_per_day=22,
        interval_s=120, duration_scale=0.2,
    )  # fmt: skip
    store = Store.create(folder / "store", threads=1)
    result = IngestResult("sacct", shape.start_s, shape.end_s)
    source = OneBatch(GeneratedSource(shape))
    ingest(source, store.of("demo"), shape.start_s, shape.end_s, result, lambda rows, reached_s: None)
    os.chdir(folder)
    summarize(store.of("demo"), load_config(folder / "almanac.toml"))
    (folder / "trained").write_text(run("train"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: NOW_S - 300.0)
        run("power", "apply")  # counts the nodes, which every decision looks back to


def run(*argv: str) -> str:
    """Return the output of `almanac` in the working folder, then what it says on stderr, and its exit code."""
    start = SimpleNamespace(name="almanac", main=lambda args, prog_name: cli.main.main(list(args)))
    done = CliRunner().invoke(start, ["--config", "almanac.toml", "--store", "store", *argv])  # type: ignore[arg-type]
    assert done.exception is None or isinstance(done.exception, SystemExit), (argv, done.output, done.exc_info)
    said = [f"--- stderr ---\n{done.stderr}"] * bool(done.stderr)
    return "".join([done.stdout, *said, *[f"--- exit code {done.exit_code} ---\n"] * bool(done.exit_code)])


def hold_still(patch: pytest.MonkeyPatch) -> None:
    """Stop the clock, take host, users, width, and time zone of no machine, and do not wait for disks."""
    patch.setattr(time, "time", lambda: float(NOW_S))
    patch.setattr(time, "time_ns", lambda: NOW_S * 10**9)
    patch.setattr(os, "fsync", lambda handle: None)
    patch.setattr(os, "geteuid", lambda: 60_000)  # neither root nor the owner of a folder: nothing is handed out
    patch.setattr(socket, "gethostname", lambda: "host")
    patch.setattr(socket, "getfqdn", lambda *_: "host.example.org")
    patch.setattr("reports.job.plots.png", lambda figure: b"")  # no golden file has a picture
    patch.setattr("cli.doctor.site.check_trust", lambda app: iter(()))  # whose the folders of the test are
    names = {uid: name for name, uid in UIDS.items()}

    def account(uid: int) -> pwd.struct_passwd:
        name = names[uid]
        return pwd.struct_passwd((name, "x", uid, os.getgid(), name, f"/home/{name}", "/bin/sh"))

    patch.setattr(pwd, "getpwuid", account)
    patch.setattr(pwd, "getpwnam", lambda name: account(UIDS[name]))
    patch.setattr(grp, "getgrgid", lambda gid: grp.struct_group(("root", "x", gid, [])))
    patch.setattr(pwd, "getpwall", lambda: [account(uid) for uid in names])
    patch.setattr(warnings, "showwarning", warnings.showwarning)  # cli.main sets its own
    for name in list(os.environ):
        if name.startswith(("ALMANAC_", "SLURM_", "SBATCH_", "XDG_")):
            patch.delenv(name)
    for name, value in {"COLUMNS": "80", "LINES": "40", "NO_COLOR": "1", "TZ": "UTC", "LC_ALL": "C.UTF-8",
                        "TERM": "dumb"}.items():  # fmt: skip
        patch.setenv(name, value)
    time.tzset()


@dataclass(frozen=True)
class Bench:
    """The site of the cases. kept: folders made once for several cases. made_by_hand: gives the site of reports."""

    site: Path
    tmp: Path
    kept: dict[str, Path]
    made_by_hand: Callable[[], Any]

    @property
    def reported(self) -> Any:
        return self.made_by_hand()

    def run(self, *argv: str, site: Path | None = None) -> str:
        os.chdir(site or self.site)
        return run(*argv)

    def copied(self, site: Path | None = None) -> Path:
        """The site, or another copy of it, for a command that changes it."""
        return Path(shutil.copytree(site or self.site, Path(tempfile.mkdtemp(dir=self.tmp)) / "site"))

    @property
    def published(self) -> Path:
        """Return the files that `almanac publish` wrote."""
        if "published" not in self.kept:
            site = self.copied()
            self.run("publish", site=site)
            self.kept["published"] = site / "store" / "published" / "demo"
        return self.kept["published"]
