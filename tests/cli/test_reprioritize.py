"""`almanac reprioritize` as a person or a timer runs it, with a stand-in for Slurm's commands on PATH."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CommandLine = Any  # of conftest.py

WEIGHTS = "PriorityType=priority/multifactor\nPriorityMaxAge = 12-00:00:00\nPriorityWeightAge = 12000\n"
SLURM = """#!/bin/sh
case "$(basename "$0") $*" in
"scontrol show config") echo "ClusterName = demo"; cat {folder}/weights;;
"squeue "*) cat {folder}/queue.json;;
"sprio "*) while read -r job factor; do echo "$job|$factor|$factor|0|0|0|0|0|0|0|"; done < {folder}/factors;;
"scontrol ")
    while read -r _ job factor; do
        job=${{job#jobid=}}; factor=${{factor#sitefactor=}}
        sed -i "s/^$job .*/$job $factor/" {folder}/factors
    done;;
*) exit 9;;
esac
"""
SAYING = """
"scontrol ") while read -r _ job _; do echo "{said} for job ${{job#jobid=}}" >&2; done; exit 1;;
esac
"""


class Slurm:
    """Commands in a folder; `factors` holds what they were told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write_queue("ann", [1, 2, 3])
        (folder / "weights").write_text(WEIGHTS)
        for name in ("scontrol", "squeue", "sprio"):
            (folder / name).write_text(SLURM.format(folder=folder))
            (folder / name).chmod(0o755)

    def write_queue(self, user: str, jobs: list[int]) -> None:
        shape = {"job_state": "PENDING", "user_name": user, "priority": 1, "cpus": 4, "node_count": 1, "qos": "normal",
                 "tres_req_str": "gres/gpu=2", "time_limit": 60, "submit_time": int(time.time()) - 600}  # fmt: skip
        queue = [{**shape, "job_id": job, "name": f"evil\x1b[31m\n{job}"} for job in jobs]
        (self.folder / "queue.json").write_text(json.dumps({"jobs": queue}))
        (self.folder / "factors").write_text("".join(f"{job} 0\n" for job in jobs))

    @property
    def factors(self) -> dict[int, int]:
        rows = map(str.split, (self.folder / "factors").read_text().splitlines())
        return {int(job): int(factor) for job, factor in rows}


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    folder = tmp_path / "bin"
    folder.mkdir()
    return Slurm(folder)


@pytest.fixture
def run(site: CommandLine, slurm: Slurm, tmp_path: Path) -> Callable[..., Any]:
    """Runs the command on a copy of the site's store; raw: its whole outcome."""
    shutil.copytree(site.folder / "store", tmp_path / "store")
    base = (site.folder / "almanac.toml").read_text()

    def run(
        *argv: str,
        command: str = "reprioritize",
        mode: str = "apply",
        store: Path = tmp_path / "store",
        backend: str = "commands",
        **env: str,
    ) -> Any:
        more = f'\n[slurm]\nbackend = "{backend}"\nbin_dir = "{slurm.folder}:/bin:/usr/bin"\n'
        more += f'[priority]\nmode = "{mode}"\n'
        (tmp_path / "almanac.toml").write_text(base + more)
        run = site.process if env else site.raw
        return run("--config", str(tmp_path / "almanac.toml"), "--store", str(store), command, *argv, **env)

    return run


def test_a_dry_run_tells_slurm_nothing_and_an_applied_one_does_it_once(run: Callable[..., Any], slurm: Slurm) -> None:
    dry = run(mode="observe")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert "3 pending, 3 to change" in dry.stdout
    assert "dry run" in dry.stdout
    assert "\x1b" not in dry.stdout
    assert set(slurm.factors.values()) == {0}
    done = run("--apply")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "3 changed")
    (factor,) = set(slurm.factors.values())
    assert factor > 0
    metrics = run(command="metrics").stdout
    assert 'almanac_job_changes_day{cluster="demo",planner="reprioritize",what="set"} 3.0' in metrics
    assert 'almanac_job_change_timestamp_seconds{cluster="demo",planner="reprioritize"}' in metrics
    assert "reprioritize: 3 jobs in the queue with a change; last day: 3 set" in run(command="changes").stdout
    again = json.loads(run("--apply", "--json").stdout)
    assert (again["changes"], again["left_alone"]) == ([], {"has its site factor already": 3})
    assert run("--clear", "--apply", mode="observe").returncode == 0, "undoing needs no mode"
    assert set(slurm.factors.values()) == {0}


def test_many_changes_are_not_all_shown(run: Callable[..., Any], slurm: Slurm) -> None:
    slurm.write_queue("ann", list(range(100, 130)))
    lines = run().stdout.splitlines()
    assert "... and 10 more" in lines
    assert "... and" not in run("-n", "0").stdout
    assert len(json.loads(run("--json").stdout)["changes"]) == 30


@pytest.mark.parametrize(
    ("change", "argv", "code", "said"),
    [
        ("mode", ["--apply"], 3, "priority.mode is observe"),
        ("weights", ["--apply"], 3, "age does not count"),
        ("cluster", [], 3, "the store's cluster is demo, Slurm's is other"),
        ("model", [], 7, "no model is trained for demo"),
        ("store", [], 4, "there is no store here"),
        ("busy", ["--apply"], 4, "another process is setting site factors"),
        ("queue", [], 5, "squeue --json gave no list of jobs"),
        ("slurm", [], 5, "Unable to contact slurm controller"),
        ("Access/permission denied", ["--apply"], 6, "Slurm refused 3 changes: Access/permission denied"),
        ("Invalid user id", ["--apply"], 6, "Slurm refused 3 changes: Invalid user id"),
        ("Unexpected message received", ["--apply"], 5, "0 of 3 changes: lost the connection to slurmctld: Unexpected"),
        ("unreadable", [], 5, "none of 3 pending jobs can be read"),
    ],
)
def test_what_stands_in_the_way_is_said(
    run: Callable[..., Any], slurm: Slurm, tmp_path: Path, change: str, argv: list[str], code: int, said: str
) -> None:
    options: dict[str, Any] = {"mode": "observe"} if change == "mode" else {}
    held = None
    if change == "weights":
        (slurm.folder / "weights").write_text("PriorityType=priority/multifactor\n")
    elif change == "cluster":
        (slurm.folder / "scontrol").write_text("#!/bin/sh\necho 'ClusterName = other'\n")
    elif change == "model":
        shutil.rmtree(tmp_path / "store/models")
    elif change == "store":
        options["store"] = tmp_path / "nothing"
    elif change == "busy":
        held = (tmp_path / "store/.reprioritize-demo.lock").open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
    elif change == "queue":
        (slurm.folder / "queue.json").write_text("{}")
    elif change == "slurm":
        (slurm.folder / "squeue").write_text("#!/bin/sh\necho 'Unable to contact slurm controller' >&2; exit 1\n")
    elif change == "unreadable":
        text = (slurm.folder / "queue.json").read_text()
        (slurm.folder / "queue.json").write_text(text.replace('"submit_time"', '"submitted"'))
    elif " " in change:
        text = (slurm.folder / "scontrol").read_text()
        (slurm.folder / "scontrol").write_text(text[: text.index('"scontrol ")')] + SAYING.format(said=change))
    done = run(*argv, **options)
    if held:
        held.close()
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "try:" in done.stderr
    assert done.stdout == "", "no word of success before a failure"


@pytest.mark.parametrize(
    ("pyslurm", "code", "said"),
    [
        ("import os\nos._exit(1)\n", 3, "pyslurm crashed with exit code 1"),
        ("__version__ = '25.05.0'\n", 3, "pyslurm 25.05.0 does not support Slurm 25.11.7"),
    ],
)
def test_a_pyslurm_that_does_not_fit_is_said(
    run: Callable[..., Any], slurm: Slurm, tmp_path: Path, pyslurm: str, code: int, said: str
) -> None:
    with (slurm.folder / "weights").open("a") as file:
        file.write("SLURM_VERSION = 25.11.7\n")
    (tmp_path / "pyslurm.py").write_text(pyslurm)
    done = run(backend="pyslurm", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert said in done.stderr
