"""`almanac mig plan | apply` on a running Slurm with fake MIG GPUs: no job is hurt, and no node resumed unverified."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mig_apply_site import GRES, HALVES, ONES, SLEEP, WHOLE, MigApply, mig_apply_site
from mig_site import BAD, MigSite, mig_site
from processes import wait_until
from sites import Site

from slurm_hooks.mig.layouts import Layout

pytestmark = pytest.mark.cluster

KILLS = 25


@pytest.fixture(scope="module")
def _mig(_running_site: Site) -> Iterator[MigSite]:
    with mig_site(_running_site) as made:
        yield made


@pytest.fixture
def mig(_mig: MigSite, site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[MigApply]:
    """n1 with seven 1g.5gb and three whole GPUs, idle; n2 to n4 with whole GPUs; no jobs."""
    wait_until("no jobs", lambda: not site.run("ctl", "root", "squeue", "-h").stdout)
    _mig.fake("n1", "idle")
    if _mig.node("n1")["Gres"] != GRES[ONES] or _mig.fake("n1", "gres").strip() != GRES[ONES]:
        _mig.layout("n1", {"1g.5gb": 7}, None, None, None)
    _mig.resume("n1")
    with mig_apply_site(_mig, tmp_path, capsys) as made:
        yield made


@pytest.mark.every_release
def test_a_layout_changes_end_to_end_with_its_transcript(mig: MigApply, capsys: pytest.CaptureFixture[str]) -> None:
    site = mig.mig.site
    elsewhere = site.sbatch("alice", "-w", "n2", "--gres=gpu:a100:1", script=SLEEP.format(300))
    site.wait_for(elsewhere, "RUNNING")
    mig.wanted = {"n1": HALVES}
    planned = mig.said("plan")
    assert "change n1: 7*1g, 3x gpu -> 3g+4g, 3x gpu" in planned
    assert all(len(line) <= 80 for line in planned.splitlines())
    assert mig.lines() == []
    began = time.monotonic()
    done = mig.said("plan", "--apply")
    took_s = time.monotonic() - began
    assert "n1: done" in done
    assert [line["what"] for line in mig.lines()] == [
        "drain", "apply", "write gres", "reconfigure", "verify", "resume", "done"
    ]  # fmt: skip
    assert mig.mig.node("n1")["Gres"] == GRES[HALVES]
    # 22.05 waits some seconds for the node's answer after a restart of slurmctld.
    wait_until("n1 in service", lambda: not BAD.search(mig.mig.node("n1")["State"]))
    job = site.sbatch("alice", "--gres=gpu:3g.20gb:1", script=SLEEP.format(1))
    site.wait_for(job, "COMPLETED")
    assert (site.job(elsewhere)["JobState"], site.job(elsewhere)["Restarts"]) == ("RUNNING", "0")
    with capsys.disabled():
        first = mig.lines()[0]["time_s"]
        steps = "".join(f"  +{row['time_s'] - first:2d} s {row['what']}: {row['reason']}\n" for row in mig.lines())
        print(f"\n--- Slurm {site.release}\n$ almanac mig plan\n{planned}$ almanac mig apply   # {took_s:.1f} s")
        print(f"{done}{steps}")

    # Back again. A job that waits for the new type then keeps the last node that has it.
    mig.forget_the_day()
    mig.wanted = {"n1": ONES}
    assert mig.apply() == {"n1": "done"}
    wait_until("n1 in service", lambda: not BAD.search(mig.mig.node("n1")["State"]))
    waiting = site.sbatch("alice", "--gres=gpu:1g.5gb:1", "-H", script=SLEEP.format(1))
    mig.forget_the_day()
    mig.wanted = {"n1": HALVES}
    [refused] = mig("plan", "--apply")["outcomes"]
    assert refused["what"] == "refused" and "1g.5gb, which jobs ask for" in refused["why"], refused
    assert site.job(waiting)["Reason"] == "JobHeldUser"


def test_a_busy_node_takes_no_more_jobs_and_changes_when_its_last_one_has_ended(mig: MigApply) -> None:
    site = mig.mig.site
    job = site.sbatch("alice", "-w", "n1", "--gres=gpu:a100:1", script=SLEEP.format(300))
    site.wait_for(job, "RUNNING")
    mig.is_draining, mig.wanted = True, {"n1": HALVES}
    assert mig.apply() == {"n1": "draining"}
    assert "DRAIN" in mig.mig.node("n1")["State"]
    assert mig.apply() == {"n1": "draining"}

    # The demand changes its mind: the node takes jobs again, with the one that runs there.
    mig.wanted = {}
    assert mig.apply() == {"n1": "undone"}
    assert "DRAIN" not in mig.mig.node("n1")["State"]
    beside = site.sbatch("alice", "-w", "n1", "--gres=gpu:1g.5gb:1", script=SLEEP.format(1))
    site.wait_for(beside, "COMPLETED")

    mig.wanted = {"n1": HALVES}
    assert mig.apply() == {"n1": "draining"}
    assert (site.job(job)["JobState"], site.job(job)["Restarts"]) == ("RUNNING", "0")
    site.run("ctl", "root", "scancel", str(job))
    wait_until("the end of the job", lambda: not site.run("ctl", "root", "squeue", "-h", "-w", "n1").stdout)
    assert mig.apply() == {"n1": "done"}
    assert mig.mig.node("n1")["Gres"] == GRES[HALVES]
    mig.check()


def test_jobs_that_a_vanished_type_left_stuck_are_released_and_held_ones_are_not(mig: MigApply) -> None:
    site = mig.mig.site
    mig.mig.drain("n1")  # so that the job waits however slow the machine is
    stuck = site.sbatch("alice", "--gres=gpu:1g.5gb:1", script=SLEEP.format(1))
    held = site.sbatch("alice", "-H", "--gres=gpu:1g.5gb:1", script=SLEEP.format(1))
    mig.mig.layout("n1", {"3g.20gb": 1, "4g.20gb": 1}, None, None, None)  # by hand, against all advice
    wait_until("BadConstraints", lambda: site.job(stuck)["Reason"] == "BadConstraints")
    seen = mig("plan", "--apply")
    assert (seen["released"], seen["still_stuck"]) == ([], [str(stuck)])
    mig.wanted = {"n1": ONES}
    seen = mig("plan", "--apply")
    assert [each["what"] for each in seen["outcomes"]] == ["done"]
    assert seen["released"] == [str(stuck)]
    site.wait_for(stuck, "COMPLETED")
    assert site.job(held)["Reason"] == "JobHeldUser"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("in-use", "In use"),
        ("half-applied", "apply"),
        ("hangs", "timed out"),
        ("wrong", "Assert"),
        ("reset-refused", ""),
    ],
)
def test_a_node_that_fails_stays_drained_with_a_reason_and_can_be_taken_up_again(
    mig: MigApply, fault: str, said: str
) -> None:
    # A change of MIG mode on a GPU: every way to fail can happen in it. "hangs" would take the export before it.
    new: Layout = (("3g", "4g"), ("2g",) * 3, *WHOLE[2:])
    mig.wanted = {"n1": new}
    if fault == "hangs":
        mig.mig.fake("n1", "slow", "3")
    else:
        mig.mig.fake("n1", "fail", fault)
    assert mig.apply(code=5) == {"n1": "failed"}
    mig.mig.fake("n1", "slow", "0")
    node = mig.mig.node("n1")
    reason = mig.mig.site.run("ctl", "root", "scontrol", "show", "node", "n1").stdout.partition("Reason=")[2]
    assert "DRAIN" in node["State"]
    assert reason.startswith("almanac mig failed: ")
    assert said in reason
    assert mig.apply(code=5) == {"n1": "failed"}, "and nothing is tried again by itself"
    assert "almanac mig retry n1" in " ".join(mig.said("status").split())
    wait_until("the hanging command to end", lambda: not _is_running(mig))
    mig.said("retry", "n1")
    assert "DRAIN" not in mig.mig.node("n1")["State"]
    mig.check()
    mig.wanted = {}
    mig.forget_the_day()


def _is_running(mig: MigApply) -> bool:
    return "nvidia-mig-parted apply" in mig.mig.site.run("n1", "root", "ps", "-eo", "args").stdout


@pytest.mark.every_release
def test_kills_lose_no_job_and_resume_no_node_unverified(mig: MigApply) -> None:
    site = mig.mig.site
    running = site.sbatch("alice", "-w", "n2", "--gres=gpu:a100:1", script=SLEEP.format(900))
    site.wait_for(running, "RUNNING")
    mig.kill_again_and_again(KILLS, [HALVES, ONES], 6)
    job = site.job(running)
    assert (job["JobState"], job["Restarts"]) == ("RUNNING", "0")


def test_changes_under_load_abort_no_job(mig: MigApply) -> None:
    site, jobs = mig.mig.site, []
    long = site.sbatch("alice", "-w", "n2", "--gres=gpu:a100:4", "-t", "20", script=SLEEP.format(600))
    deadline = time.monotonic() + 600
    for changes in range(4):
        mig.wanted = {"n1": HALVES if changes % 2 == 0 else ONES}
        jobs += [site.sbatch("alice", "--gres=gpu:a100:1", "-t", "2", script=SLEEP.format(3)) for _ in range(2)]
        jobs.append(site.sbatch("bob", "-w", "n1", "-t", "2", script=SLEEP.format(1)))
        mig.forget_the_day()
        while "done" not in mig.apply().values():
            assert time.monotonic() < deadline, f"{changes} changes"
            mig.check()
        mig.check()
    for job in jobs:
        site.wait_for(job, "COMPLETED")
        assert site.job(job)["Restarts"] == "0"
    assert (site.job(long)["JobState"], site.job(long)["Restarts"]) == ("RUNNING", "0")
