"""Facts of Slurm that almanac relies on when a node's MIG layout changes, on every release, and the differences.

n1 has fake MIG GPUs (mig_site.py): GPU 0 in slices, GPUs 1 to 3 whole. n2 to n4 have 4 whole GPUs each.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from mig_site import MigSite, Slices, mig_site
from native_site import NativeSite
from processes import LabError, wait_until
from sites import Site

pytestmark = [pytest.mark.cluster, pytest.mark.every_release]

ONES: Slices = {"1g.5gb": 7}
TWOS: Slices = {"2g.10gb": 3}
ONES_GRES, TWOS_GRES = "gpu:1g.5gb:7,gpu:a100:3", "gpu:2g.10gb:3,gpu:a100:3"
SLEEP = "#!/bin/sh\nsleep 120\n"
UNAVAILABLE = "Requested node configuration is not available"


@pytest.fixture(scope="module")
def _mig(_running_site: Site) -> Iterator[MigSite]:
    with mig_site(_running_site) as made:
        yield made


@pytest.fixture
def any_mig(_mig: MigSite, site: Site) -> MigSite:
    """No jobs, and n1 as the test before left it."""
    wait_until("no jobs", lambda: not site.run("ctl", "root", "squeue", "-h").stdout)
    return _mig


@pytest.fixture
def mig(any_mig: MigSite) -> MigSite:
    """n1 idle with seven 1g.5gb and three whole GPUs, no jobs."""
    has(any_mig, ONES, ONES_GRES)
    return any_mig


def has(mig: MigSite, slices: Slices, gres: str) -> None:
    """Makes it the layout of n1, unless it is."""
    if mig.node("n1")["Gres"] != gres or mig.fake("n1", "gres").strip() != gres:
        mig.layout("n1", slices, None, None, None)
    mig.resume("n1")


def held_gpus(mig: MigSite, job_id: int) -> str:
    """The GPUs that a running job holds, with their types, such as gpu:a100:1(IDX:7)."""
    shown = mig.site.run("ctl", "root", "scontrol", "-d", "show", "job", str(job_id)).stdout
    found = re.search(r" GRES=(\S+)", shown)
    return "" if found is None else re.sub(r",?gpu:\w+:0\(IDX:\)", "", found[1])


def submitted(mig: MigSite, *options: str) -> int:
    return mig.site.sbatch("alice", "-N", "1", "-n", "1", "-t", "5", *options, script=SLEEP)


def running(mig: MigSite, *options: str) -> int:
    job = submitted(mig, *options)
    mig.site.wait_for(job, "RUNNING")
    return job


def user(mig: MigSite, *argv: str, name: str = "alice") -> str:
    """Return scontrol's objection as a user; "" if it obeyed."""
    done = mig.site.run("login", name, "scontrol", *argv, check=False)
    assert bool(done.rc) == bool(done.stderr), done
    return done.stderr


def reason(mig: MigSite, job_id: int) -> tuple[str, int]:
    job = mig.site.job(job_id)
    return job["Reason"], int(job["Priority"])


@pytest.mark.parametrize("option", ["--gres=gpu:3g.20gb:1", "--gpus=3g.20gb:1", "--gpus-per-node=3g.20gb:1"])
def test_a_type_that_no_node_has_is_refused_at_submission(mig: MigSite, option: str) -> None:
    with pytest.raises(LabError, match=UNAVAILABLE):
        submitted(mig, option)


@pytest.mark.parametrize("option", ["--gpus=1", "--gres=gpu:1"])
def test_an_untyped_request_lands_on_a_slice_beside_idle_whole_gpus(mig: MigSite, option: str) -> None:
    assert held_gpus(mig, running(mig, option)) == "gpu:1g.5gb:1(IDX:0)"


def test_a_changed_layout_reaches_slurm_and_the_jobs_elsewhere_live_on(mig: MigSite) -> None:
    elsewhere = running(mig, "-w", "n2", "--gpus=1")
    mig.drain("n1")
    mig.parted("n1", TWOS, None, None, None)
    mig.write_gres("n1", TWOS_GRES)
    mig.reconfigure()
    if mig.is_old:
        # Fewer GPUs than before: invalid, with the old Gres or the new one in the text.
        wait_until("INVAL", lambda: "INVALID_REG" in mig.node("n1")["State"])
        mig.restart()
    began = time.monotonic()
    mig.wait_for_gres("n1", TWOS_GRES)
    assert time.monotonic() - began < 60, "at once, not when the node registers again after minutes"
    assert mig.node("n1")["State"] == "IDLE+DRAIN"
    assert mig.node("n1")["Reason"] == "mig"  # "mig test" as it is cut at its space: the node's own drain
    assert (mig.site.job(elsewhere)["JobState"], mig.site.job(elsewhere)["Restarts"]) == ("RUNNING", "0")
    mig.resume("n1")
    assert held_gpus(mig, running(mig, "--gres=gpu:2g.10gb:2")) == "gpu:2g.10gb:2(IDX:0-1)"
    with pytest.raises(LabError, match=UNAVAILABLE):
        submitted(mig, "--gres=gpu:1g.5gb:1")


def test_more_gpus_than_before_are_not_noticed_by_22_05_without_a_restart(any_mig: MigSite) -> None:
    """The node is idle all the time, with the old Gres: its state alone proves nothing."""
    mig = any_mig
    has(mig, TWOS, TWOS_GRES)
    mig.drain("n1")
    mig.parted("n1", ONES, None, None, None)
    mig.write_gres("n1", ONES_GRES)
    mig.reconfigure()
    if mig.is_old:
        time.sleep(2)
        assert (mig.node("n1")["State"], mig.node("n1")["Gres"]) == ("IDLE+DRAIN", TWOS_GRES)
        mig.restart()
    mig.wait_for_gres("n1", ONES_GRES)


def test_jobs_of_a_vanished_type_stay_behind_until_they_are_released(mig: MigSite) -> None:
    site = mig.site
    mig.drain("n1")
    waiting = [submitted(mig, "--gres=gpu:1g.5gb:1"), submitted(mig, "--gpus=1g.5gb:1")]
    by_user = submitted(mig, "--hold", "--gpus=1g.5gb:1")
    site.wait_until_accounted(*waiting)
    mig.layout("n1", TWOS, None, None, None)
    wait_until("BadConstraints", lambda: {reason(mig, job) for job in waiting} == {("BadConstraints", 0)})
    mig.layout("n1", ONES, None, None, None)
    time.sleep(3)
    assert {reason(mig, job) for job in waiting} == {("BadConstraints", 0)}
    for job in waiting:
        site.run("ctl", "root", "scontrol", "release", str(job))
        site.wait_for(job, "RUNNING")
    assert reason(mig, by_user) == ("JobHeldUser", 0)


SAME = "gpu:a100:1"
UPDATES = [
    ("--gres=gpu:1g.5gb:1", "gres=gpu:a100:1", SAME),
    ("--gpus-per-node=1g.5gb:1", "TresPerNode=gres/gpu:a100:1", SAME),
    ("--gpus=1g.5gb:1", "TresPerJob=gres/gpu:a100:1", SAME),
    ("--gpus-per-task=1g.5gb:1", "TresPerTask=gres/gpu:a100:1", SAME),
    ("--gpus=1g.5gb:1", "gres=gpu:a100:1", "both"),
    ("--gres=gpu:1g.5gb:1", "TresPerJob=gres/gpu:a100:1", "both"),
    ("--gres=gpu:1g.5gb:1", "gres=gpu:a100:2", "gpu:a100:2"),
]


@pytest.mark.parametrize(("option", "change", "held"), UPDATES)
def test_a_pending_jobs_type_changes_by_the_field_it_was_submitted_with(
    mig: MigSite, option: str, change: str, held: str
) -> None:
    """By another field it then holds both types. On 22.05 it holds both, or the old one, whatever the field."""
    job = submitted(mig, "--hold", option)
    # 22.05 takes gres: and, without any effect, gres/.
    assert user(mig, "update", f"jobid={job}", change.replace("gres/", "gres:") if mig.is_old else change) == ""
    assert user(mig, "release", str(job)) == ""
    mig.site.wait_for(job, "RUNNING")
    got = re.sub(r"\(.*?\)", "", held_gpus(mig, job))
    both = {"gpu:1g.5gb:1", held if mig.is_old and held != "both" else "gpu:a100:1"}
    assert set(got.split(",")) == (both if mig.is_old or held == "both" else {held})


def test_22_05_takes_a_change_written_as_it_prints_later_and_does_nothing(mig: MigSite) -> None:
    job = submitted(mig, "--hold", "--gpus=1g.5gb:1")
    assert user(mig, "update", f"jobid={job}", "TresPerJob=gres/gpu:a100:1") == ""
    assert mig.site.job(job)["TresPerJob"] == "gres/gpu:a100:1"
    user(mig, "release", str(job))
    mig.site.wait_for(job, "RUNNING")
    assert held_gpus(mig, job).startswith("gpu:1g.5gb:1" if mig.is_old else "gpu:a100:1")


def test_a_pending_job_may_be_given_a_type_that_no_node_has(mig: MigSite) -> None:
    """Nothing is refused; it then waits for ever. So whoever changes a type looks first whether a node has it."""
    job = submitted(mig, "--hold", "--gres=gpu:1g.5gb:1")
    assert user(mig, "update", f"jobid={job}", "gres=gpu:3g.20gb:1") == ""
    user(mig, "release", str(job))
    if mig.is_old:
        return  # it asks for both, and 22.05 says so at another point
    wait_until("BadConstraints", lambda: reason(mig, job) == ("BadConstraints", 0))


RESTARTABLE = """#!/bin/sh
trap 'echo checkpoint' USR1
echo "start ${SLURM_RESTART_COUNT:-0}"
for step in $(seq 240); do sleep 0.5; done
"""


def test_the_owner_alone_moves_a_job_to_a_larger_slice(mig: MigSite) -> None:
    """Same job id, output kept, long before a requeue's 121 s. 22.05 gives it both types: never there."""
    site = mig.site
    home = site.run("login", "alice", "pwd").stdout.strip()
    out = f"{home}/moved.out"
    done = site.run("login", "alice", "sbatch", "--parsable", "-o", out, "--open-mode=append", "-w", "n1",
                    "--gres=gpu:1g.5gb:1", stdin=RESTARTABLE)  # fmt: skip
    job = int(done.stdout)
    site.wait_for(job, "RUNNING")
    node = "n1"
    wait_until("its first line", lambda: "start 0" in site.run(node, "root", "cat", out, check=False).stdout)
    site.run("login", "alice", "scancel", "--signal=USR1", "--batch", str(job))
    wait_until("its checkpoint", lambda: "checkpoint" in site.run(node, "root", "cat", out).stdout)
    assert user(mig, "requeuehold", str(job)) == ""
    wait_until("held", lambda: reason(mig, job)[1] == 0 and site.job(job)["JobState"] == "PENDING")
    assert user(mig, "update", f"jobid={job}", "gres=gpu:a100:1", "starttime=now") == ""
    # slurmd refuses the job's credential within the second in which it revoked the earlier one, and the job FAILS.
    time.sleep(2)
    assert user(mig, "release", str(job)) == ""
    site.wait_for(job, "RUNNING")
    assert site.job(job)["Restarts"] == "1"
    wait_until("its second start", lambda: "start 1" in site.run(node, "root", "cat", out).stdout)
    written = site.run(node, "root", "cat", out).stdout.splitlines()
    # slurmd and bash write lines of their own as the first run ends ("error: ...", "Terminated")
    lines = [line for line in written if line.startswith(("start ", "checkpoint"))]
    assert lines == ["start 0", "checkpoint", "start 1"]
    got = re.sub(r"\(.*?\)", "", held_gpus(mig, job)).split(",")
    assert set(got) == ({"gpu:1g.5gb:1", "gpu:a100:1"} if mig.is_old else {"gpu:a100:1"})
    site.remove("login", out)
    site.remove(node, out)


def test_a_plain_requeue_waits_two_minutes_and_others_may_not_requeue_at_all(mig: MigSite) -> None:
    job = running(mig, "--gpus=1g.5gb:1")
    denied = [user(mig, "requeuehold", str(job), name="bob"), user(mig, "update", f"jobid={job}", "gres=gpu:a100:1",
                                                                    name="bob")]  # fmt: skip
    assert all("denied" in text or "Invalid user" in text for text in denied), denied
    fixed = running(mig, "--no-requeue", "--gpus=1g.5gb:1")
    assert "disabled" in user(mig, "requeuehold", str(fixed))
    assert mig.site.job(fixed)["JobState"] == "RUNNING"
    assert user(mig, "requeue", str(job)) == ""
    wait_until("the requeue", lambda: mig.site.job(job)["Reason"] == "BeginTime")
    shown = mig.site.job(job)
    wait = time.mktime(time.strptime(shown["EligibleTime"], "%Y-%m-%dT%H:%M:%S")) - time.mktime(
        time.strptime(shown["SubmitTime"], "%Y-%m-%dT%H:%M:%S")
    )
    assert 119 <= wait <= 123


def test_a_changed_gres_aborts_the_job_of_a_busy_node(mig: MigSite) -> None:
    """So almanac changes no node that has a job. 24.11 and later abort it at the reconfigure, 22.05 at the restart."""
    job = running(mig, "--gres=gpu:1g.5gb:1")
    mig.parted("n1", TWOS, None, None, None)
    mig.write_gres("n1", TWOS_GRES)
    mig.reconfigure()
    if mig.is_old:
        wait_until("INVAL", lambda: "INVALID_REG" in mig.node("n1")["State"])
        assert mig.site.job(job)["JobState"] == "RUNNING"
        assert mig.node("n1")["Reason"].startswith("gres/gpu")  # Slurm's own drain, which nothing takes back
        mig.restart()
    wait_until("the abort", lambda: mig.site.job(job)["Restarts"] == "1")
    assert "due to use of invalid GRES configuration" in mig.site.controller_log()


def test_a_node_whose_slurmd_is_ahead_of_slurmctld_is_invalid_and_stays_drained(mig: MigSite) -> None:
    """Slurm's own reason for it survives the reconfigure that makes the node valid again."""
    if isinstance(mig.site, NativeSite):
        return  # slurmctld and slurmd share one slurm.conf here
    mig.parted("n1", TWOS, None, None, None)
    mig.site.run("n1", "root", "sv", "-w", "20", "restart", "slurmd")
    wait_until("INVAL", lambda: "INVALID_REG" in mig.node("n1")["State"])
    mig.take("n1", TWOS_GRES)
    assert mig.node("n1")["State"] == "IDLE+DRAIN"
    assert mig.node("n1")["Reason"].startswith("gres/gpu")
