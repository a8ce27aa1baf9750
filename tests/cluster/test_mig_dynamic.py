"""`almanac mig apply` on a dynamic node of a running Slurm: it is deleted, and comes back drained with its new Gres."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mig_apply_site import GRES, HALVES, SLEEP, WHOLE, MigApply, mig_apply_site
from mig_dynamic_site import DynamicMigSite, dynamic_mig_site
from mig_site import BAD
from processes import wait_until
from sites import Site

pytestmark = pytest.mark.cluster

KILLS = 8


@pytest.fixture(scope="module")
def _dynamic(_running_site: Site) -> Iterator[DynamicMigSite]:
    with dynamic_mig_site(_running_site) as made:
        yield made


@pytest.fixture
def mig(_dynamic: DynamicMigSite, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[MigApply]:
    """n1 dynamic, with whole GPUs, idle; no jobs."""
    wait_until("no jobs", lambda: not site.run("ctl", "root", "squeue", "-h").stdout)
    if _dynamic.node("n1")["Gres"] != GRES[WHOLE] or _dynamic.fake("n1", "gres").strip() != GRES[WHOLE]:
        _dynamic.layout("n1", None, None, None, None)
    _dynamic.resume("n1")
    with mig_apply_site(_dynamic, tmp_path, capsys) as made:
        yield made


def reason(mig: MigApply) -> str:
    return mig.mig.site.run("ctl", "root", "scontrol", "show", "node", "n1").stdout.partition("Reason=")[2]


@pytest.mark.every_release
def test_a_dynamic_node_changes_with_jobs_waiting_for_it(mig: MigApply, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs of the new type start, and a job elsewhere lives on."""
    site = mig.mig.site
    assert "DYNAMIC_NORM" in mig.mig.node("n1")["State"]
    elsewhere = site.sbatch("alice", "-w", "n2", "--gres=gpu:a100:1", script=SLEEP.format(300))
    site.wait_for(elsewhere, "RUNNING")
    begin = site.sbatch("alice", "-w", "n1", "--gres=gpu:a100:1", "-H", script=SLEEP.format(1))
    mig.wanted = {"n1": HALVES}
    done = mig.said("plan", "--apply")
    assert "n1: done" in done
    assert [line["what"] for line in mig.lines()] == [
        "drain", "apply", "write gres", "delete", "register", "drain", "settle", "verify", "resume", "done"
    ]  # fmt: skip
    node = mig.mig.node("n1")
    assert (node["Gres"], "DYNAMIC_NORM" in node["State"]) == (GRES[HALVES], True)
    wait_until("n1 in service", lambda: not BAD.search(mig.mig.node("n1")["State"]))
    site.run("ctl", "root", "scontrol", "release", str(begin))
    new = site.sbatch("alice", "--gres=gpu:3g.20gb:1", script=SLEEP.format(1))
    for job in (begin, new):
        site.wait_for(job, "COMPLETED")
    assert (site.job(elsewhere)["JobState"], site.job(elsewhere)["Restarts"]) == ("RUNNING", "0")
    with capsys.disabled():
        first = mig.lines()[0]["time_s"]
        steps = "".join(f"      +{row['time_s'] - first:2d} s {row['what']}: {row['reason']}\n" for row in mig.lines())
        print(f"\n--- Slurm {site.release}, a dynamic node\n$ almanac mig apply\n{done}{steps}")


@pytest.mark.every_release
def test_slurm_deletes_no_busy_node_and_almanac_no_reserved_one(mig: MigApply) -> None:
    site = mig.mig.site
    job = site.sbatch("alice", "-w", "n1", "--gres=gpu:a100:1", script=SLEEP.format(300))
    site.wait_for(job, "RUNNING")
    refused = site.run("ctl", "root", "scontrol", "delete", "nodename=n1", check=False)
    assert refused.rc and "busy" in refused.stderr
    mig.wanted = {"n1": HALVES}
    assert mig.apply() == {"n1": "refused"}
    site.run("ctl", "root", "scancel", str(job))
    wait_until("the job's end", lambda: not site.run("ctl", "root", "squeue", "-h", "-w", "n1").stdout)
    create = ("reservationname=later", "nodes=n1", "starttime=now+20days", "duration=60", "users=root")
    site.run("ctl", "root", "scontrol", "create", "reservation", *create)
    try:
        [outcome] = mig("plan", "--apply")["outcomes"]
        assert (outcome["what"], "reserved" in outcome["why"]) == ("refused", True), outcome
    finally:
        site.run("ctl", "root", "scontrol", "delete", "reservationname=later")
    assert mig.mig.node("n1")["Gres"] == GRES[WHOLE]


def test_a_slurmd_that_does_not_start_leaves_the_node_out_of_service_until_it_is_repaired(mig: MigApply) -> None:
    path = f"{mig.mig.bin_dir('n1')}/register"
    works = mig.mig.site.read("n1", path)
    mig.wanted = {"n1": HALVES}
    mig.mig.site.write("n1", path, b"#!/bin/sh\ncat >/dev/null; echo no slurmd here >&2; exit 3\n", mode=0o755)
    try:
        assert mig.apply(code=5) == {"n1": "failed"}
        assert reason(mig).startswith("almanac mig failed: registration: register ended with 3: no slurmd here")
        assert "DRAIN" in mig.mig.node("n1")["State"]
    finally:
        mig.mig.site.write("n1", path, works, mode=0o755)
    assert mig.apply(code=5) == {"n1": "failed"}, "and nothing is tried again by itself"
    mig.said("retry", "n1", "--old")
    assert mig.mig.node("n1")["Gres"] == GRES[WHOLE]
    mig.check()


def test_kills_lose_no_job_and_resume_no_node_unverified(mig: MigApply) -> None:
    """After each kill, n1 is gone, drained, or has in Slurm what its GPUs are."""
    site = mig.mig.site
    running = site.sbatch("alice", "-w", "n2", "--gres=gpu:a100:1", script=SLEEP.format(900))
    site.wait_for(running, "RUNNING")
    mig.kill_again_and_again(KILLS, [HALVES, WHOLE], 8)
    waiting = site.sbatch("alice", "-w", "n1", "--gres=gpu:a100:1", script=SLEEP.format(1))
    site.wait_for(waiting, "COMPLETED")
    assert (site.job(running)["JobState"], site.job(running)["Restarts"]) == ("RUNNING", "0")


@pytest.mark.every_release
def test_jobs_that_wait_for_a_node_by_name_outlive_its_deletion(mig: MigApply) -> None:
    """Slurm considers them while the node is gone, too."""
    site = mig.mig.site
    assert isinstance(mig.mig, DynamicMigSite)
    mig.mig.drain("n1")
    waiting = site.sbatch("alice", "-w", "n1", "--gres=gpu:a100:1", script=SLEEP.format(1))
    mig.mig.delete()
    time.sleep(4)
    assert site.job(waiting)["JobState"] == "PENDING"
    mig.mig.register(f"Gres={GRES[WHOLE]} State=DRAIN Reason=almanac-mig")
    wait_until("n1, drained", lambda: "DRAIN" in mig.mig.node("n1").get("State", ""))
    assert (site.job(waiting)["JobState"], site.job(waiting)["Priority"] != "0") == ("PENDING", True)
    mig.mig.resume("n1")
    site.wait_for(waiting, "COMPLETED")
