"""Placements and requeues on a Slurm that answers as the real ones do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from job_slurm import NOW_S, SETTINGS, FakeNode, Job, Killed, Run, of_types, speeds_of, start

from almanac.errors import CommandError, ConfigError
from slurm.backend import CommandBackend
from slurm_hooks.jobs.engine import JobOutcome
from slurm_hooks.types.decide import cluster_of
from slurm_hooks.types.run import read_terms, read_view, require_placement

GRES = replace(SETTINGS, select_by="gres", requeue=False)
SOONER = "ends 12 h 18 min sooner, after a cost of 4 min"
PLACED = ["place: 1 h on h100", "placed: Slurm shows the new request"]


def running(number: int, node: str = "n1", **values: object) -> Job:
    job = Job(number, state="RUNNING", nodes=node, start_s=NOW_S - 7200, reason="None", limit_min=2880)
    return replace(job, **({"comment": "almanac:any-gpu,almanac:movable"} | values))  # type: ignore[arg-type]


@pytest.mark.parametrize("is_old", [True, False])
def test_a_pending_job_gets_the_type_on_which_it_ends_first(tmp_path: Path, is_old: bool) -> None:
    run = start(tmp_path, Job(11), is_old=is_old)
    assert run() == JobOutcome(waiting=1)
    assert run.slurm.sent == ["update jobid=11 Features=h100"]
    assert run.story == PLACED
    assert run() == JobOutcome(), "a second run changes nothing"
    assert len(run.slurm.sent) == 1


def test_a_running_job_has_its_type_also_where_no_other_type_is_up(tmp_path: Path) -> None:
    slurm = start(tmp_path, running(11), nodes=of_types(a100=2)).slurm
    cluster = cluster_of(read_view(CommandBackend(slurm), slurm, "lab", slurm.clock), SETTINGS)
    assert [cluster.type_of(job) for job in cluster.view.jobs] == ["a100"]


@pytest.mark.parametrize(("earlier_s", "is_its_own"), [(0, True), (86_400, True), (86_401, False)])
def test_the_submit_line_of_an_earlier_job_of_this_number_is_not_read(
    tmp_path: Path, earlier_s: int, is_its_own: bool
) -> None:
    run = start(tmp_path, running(11, accounted_s=NOW_S - 7200 - earlier_s))
    [job] = run.jobs()
    assert ("submit line" not in read_terms(run.slurm, job, {}).why_not) == is_its_own


def test_undo_gives_back_exactly_what_the_owner_wrote(tmp_path: Path) -> None:
    own = {11: "ib&[a100|h100]", 12: "", 13: "a100"}
    run = start(tmp_path, *(Job(number, features=text) for number, text in own.items()))
    run.slurm.nodes = of_types(a100=1, h100=8)
    run()
    changed = {number: job.features for number, job in run.slurm.jobs.items()}
    assert changed == {11: "ib&h100", 12: "h100", 13: "h100"}
    assert run(is_clearing=True) == JobOutcome(undone=3)
    assert {number: job.features for number, job in run.slurm.jobs.items()} == own
    assert run(is_clearing=True) == JobOutcome()


def test_a_job_that_starts_while_its_request_is_given_back_is_left(tmp_path: Path) -> None:
    run = start(tmp_path, Job(11))
    run()
    run.slurm.before = lambda command: (
        run.slurm.jobs.clear() if command.startswith("squeue") and len(run.slurm.sent) == 2 else None
    )
    assert run(is_clearing=True) == JobOutcome(started=1)
    assert run.kinds == ["place", "placed", "undo"]


def test_a_gres_type_is_changed_and_given_back(tmp_path: Path) -> None:
    run = start(tmp_path, Job(11, features="", requests={"TresPerNode": "gres/gpu:a100:1"}))
    run.slurm.nodes = [FakeNode(kind, {kind: 2}, partitions=("gpu",)) for kind in ("a100", "h100")]
    run.settings = GRES
    run()
    assert run.slurm.jobs[11].requests["TresPerNode"] == "gres/gpu:h100:1"
    run(is_clearing=True)
    assert run.slurm.jobs[11].requests["TresPerNode"] == "gres/gpu:a100:1"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"comment": ""}, "did not say"),
        ({"comment": "almanac:any-gpux"}, "did not say"),
        ({"partition": "all"}, "partition does not take part"),
        ({"partition": "gpu,all"}, "partition does not take part"),
        ({"priority": 0, "reason": "JobHeldUser"}, "held"),
        ({"reason": "Dependency", "more": {"dependency": "afterok:3"}}, "dependency"),
        ({"reason": "BeginTime"}, "does not wait for resources"),
        ({"reason": "QOSMaxGRESPerUser"}, "does not wait for resources"),
        ({"more": {"array_job_id": 11}}, "array"),
        ({"more": {"het_job_id": 11}}, "heterogeneous"),
        ({"more": {"resv_name": "r"}}, "reservation"),
        ({"more": {"required_nodes": "n1"}}, "names its nodes"),
        ({"features": "[a100*1&h100*1]"}, "none that almanac can change"),
        ({"limit_min": 30}, "fewer than two of its types"),
    ],
)
def test_jobs_that_are_left_alone(tmp_path: Path, change: dict[str, object], why: str) -> None:
    run = start(tmp_path, replace(Job(11), **change))  # type: ignore[arg-type]
    run()
    assert run.slurm.sent == run.kinds == []
    assert any(why in reason for reason in run.why), run.why


def test_others_who_wait_keep_their_gpus(tmp_path: Path) -> None:
    """Shorter jobs that need h100 are first in the decision, so that a job which accepts any goes to a100."""
    others = [Job(number, features="h100", comment="", user="bob", limit_min=50) for number in (12, 13, 14)]
    run = start(tmp_path, Job(11), *others)
    run.speeds = speeds_of(a100=4000, h100=3600)
    run()
    assert run.slurm.sent == ["update jobid=11 Features=a100"]


def test_a_job_that_still_waits_gets_its_own_request_back(tmp_path: Path) -> None:
    run = start(tmp_path, Job(11))
    run()
    busy = [running(number, "n2", comment="") for number in (21, 22)]
    run.slurm.jobs |= {job.job_id: job for job in [*busy, *(running(n, "n1", comment="") for n in (23, 24))]}
    run.slurm.sleep(300)
    run()
    assert run.slurm.jobs[11].features == "h100", "within 10 minutes it stays"
    assert run.why["placed, and still waits"] == 1
    run.slurm.sleep(400)
    assert run() == JobOutcome(undone=1)
    assert run.story[-1] == "undone: still waits after 12 min"
    assert run.slurm.jobs[11].features == "[a100|h100]"
    run.slurm.jobs = {11: run.slurm.jobs[11]}
    run()
    assert run.slurm.jobs[11].features == "[a100|h100]", "within an hour it stays"
    run.slurm.sleep(3600)
    run()
    assert run.slurm.jobs[11].features == "h100"


@pytest.mark.parametrize(
    ("theirs", "what"),
    [
        ("v100", "changed it"),
        ("[a100|h100]", "gave it its own request back"),
        ("", "changed it"),
    ],
)
def test_the_owners_scontrol_wins(tmp_path: Path, theirs: str, what: str) -> None:
    run = start(tmp_path, Job(11))
    run()
    run.slurm.jobs[11].features = theirs
    for _ in range(4):
        run()
        run(is_clearing=True)
        run.slurm.sleep(4000)
    assert run.slurm.jobs[11].features == theirs
    assert run.story == [*PLACED, f"owner: somebody else {what}"]


@pytest.mark.parametrize(
    ("change", "is_known"),
    [({"more": {"excluded_nodes": "n[2-3]"}}, False), ({"gpus": 3}, False), ({"more": {"excluded_nodes": "n3"}}, True)],
)
def test_types_that_no_node_of_the_job_has(tmp_path: Path, change: dict[str, object], is_known: bool) -> None:
    run = start(tmp_path, replace(Job(11), **change))  # type: ignore[arg-type]
    run()
    assert bool(run.slurm.sent) is is_known
    assert ("fewer than two of its types are known" in run.why) is not is_known


def test_a_type_outside_of_the_jobs_partition(tmp_path: Path) -> None:
    """Both partitions take part, but the job's has no h100."""
    run = start(tmp_path, Job(11, partition="small"))
    run.settings = replace(SETTINGS, partitions=("gpu", "small"))
    run.slurm.nodes[0].partitions = ("gpu", "small")
    run()
    assert run.slurm.sent == []
    assert "fewer than two of its types are known" in run.why


def test_a_limit_on_the_new_type_gives_the_own_request_back(tmp_path: Path) -> None:
    run = start(tmp_path, Job(11))
    run()
    run.slurm.jobs[11].reason = "QOSMaxGRESPerUser"
    run()
    assert run.slurm.jobs[11].features == "h100"
    run.slurm.sleep(700)
    assert run() == JobOutcome(undone=1)
    assert run.slurm.jobs[11].features == "[a100|h100]"


def test_withdrawn_consent_gives_the_request_back(tmp_path: Path) -> None:
    run = start(tmp_path, Job(11))
    run()
    run.slurm.jobs[11].comment = ""
    assert run() == JobOutcome(undone=1)
    assert run.slurm.jobs[11].features == "[a100|h100]"


@pytest.mark.parametrize("age_s", [61, -10])
def test_an_old_look_at_slurm_changes_nothing(tmp_path: Path, age_s: int) -> None:
    run = start(tmp_path, Job(11))
    made = run.plan()
    run.slurm.sleep(age_s)
    with pytest.raises(CommandError, match="old"):
        run.act(made)
    assert run.slurm.sent == run.kinds == []


@pytest.mark.parametrize("states", [("DOWN",), ("IDLE", "DRAIN"), ("IDLE", "POWERED_DOWN")])
def test_nodes_out_of_service_offer_nothing(tmp_path: Path, states: tuple[str, ...]) -> None:
    run = start(tmp_path, Job(11))
    for node in run.slurm.nodes:
        node.states = states
    run()
    assert run.slurm.sent == []


@pytest.mark.parametrize(
    ("settings", "release", "is_fine"),
    [(SETTINGS, "22.05.8", True), (GRES, "22.05.8", False), (GRES, "24.11.5", True),
     (replace(SETTINGS, partitions=()), "24.11.5", False), (replace(SETTINGS, types=("a100",)), "24.11.5", False)],
)  # fmt: skip
def test_what_a_site_must_have(settings: object, release: str, is_fine: bool) -> None:
    if is_fine:
        require_placement(settings, release)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError):
        require_placement(settings, release)  # type: ignore[arg-type]


def slow(run: Run) -> Run:
    """A job on a100 that needs 20 h there, of which 2 h are done, and 5 h on h100."""
    run.speeds = speeds_of(a100=72_000, h100=18_000)
    return run


def test_a_movable_job_is_requeued_to_a_faster_type(tmp_path: Path) -> None:
    run = slow(start(tmp_path, running(21)))
    assert run() == JobOutcome(requeued=1)
    assert run.slurm.sent == [
        "scancel --signal=USR1 --batch 21",
        "scontrol requeue 21",
        "scontrol update jobid=21 Features=h100",
    ]
    assert run.story == [f"requeue: {SOONER} (0, 0.100)", f"requeued: {SOONER} (1, 0.100)"]
    assert run.slurm.jobs[21].features == "h100"
    assert run.slurm.clock() - NOW_S >= 30, "the time that --signal asks for"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"comment": "almanac:any-gpu"}, ""),
        ({"comment": "almanac:movable"}, ""),
        ({"partition": "all"}, "partition does not take part"),
        ({"requeue": False}, "cannot be requeued"),
        ({"script": "#!/bin/sh\n#SBATCH --open-mode=append\n"}, "no --signal"),
        ({"script": "#!/bin/sh\n#SBATCH --signal=USR1\n"}, "empty its output"),
        ({"line": ""}, "submit line"),
        ({"start_s": NOW_S - 1800}, "within an hour"),
        ({"restarts": 1}, "restarted by somebody else"),
        ({"more": {"array_job_id": 21}}, "array"),
        ({"limit_min": 400}, "run times are not known"),
        ({"script": "#!/bin/sh\n#SBATCH --open-mode=append --signal=USR1@900\n"}, "checkpoint than 300 s"),
    ],
)
def test_running_jobs_that_are_left_alone(tmp_path: Path, change: dict[str, object], why: str) -> None:
    run = slow(start(tmp_path, running(21, **change)))
    run()
    assert run.slurm.sent == run.kinds == []
    assert not why or any(why in reason for reason in run.why), run.why


@pytest.mark.parametrize(("h100_s", "is_worth_it"), [(8100, True), (9300, False)])
def test_a_requeue_must_gain_more_than_it_costs(tmp_path: Path, h100_s: int, is_worth_it: bool) -> None:
    """A third of 3 h is left. By cautious run times, h100 saves 585 s or 165 s; a requeue costs 121 s and 120 s."""
    run = start(tmp_path, running(21))
    run.speeds = speeds_of(a100=10_800, h100=h100_s)
    run()
    assert ("scontrol requeue 21" in run.slurm.sent) is is_worth_it
    assert ("would gain less than the requeue costs" in run.why) is not is_worth_it


def test_requeue_is_off_by_default(tmp_path: Path) -> None:
    run = slow(start(tmp_path, running(21)))
    run.settings = replace(SETTINGS, requeue=False)
    run()
    assert run.slurm.sent == []


def test_no_requeue_without_free_gpus(tmp_path: Path) -> None:
    run = slow(start(tmp_path, running(21), running(31, "n2", comment=""), running(32, "n2", comment="")))
    run()
    assert run.slurm.sent == []


def test_one_requeue_an_hour_and_two_in_all(tmp_path: Path) -> None:
    run = start(tmp_path, running(21))
    requeues = []
    for _ in range(8):
        kind = run.slurm.jobs[21].nodes == "n1"
        run.speeds = speeds_of(a100=720_000, h100=180_000) if kind else speeds_of(a100=180_000, h100=720_000)
        run.slurm.jobs[21].limit_min = 20_000
        requeues.append(run().requeued)
        job = run.slurm.jobs[21]
        if job.state == "PENDING":
            run.slurm.sleep(130)
            job.state, job.start_s, job.reason = "RUNNING", int(run.slurm.now_s), "None"
            job.nodes = "n2" if job.features == "h100" else "n1"
        run.slurm.sleep(1900)
    assert (sum(requeues), requeues[1]) == (2, 0)
    delays = run.log.history("lab", int(run.slurm.now_s)).delays_s
    assert len(delays) == 2
    assert all(130 <= delay <= 170 for delay in delays)


@pytest.mark.parametrize("moment", ["scancel", "squeue", "scontrol requeue", "scontrol update"])
def test_killed_in_a_requeue(tmp_path: Path, moment: str) -> None:
    """The job is never held, and never lost: it runs on, or waits and gets its new request from the next run."""
    run = slow(start(tmp_path, running(21)))
    made = run.plan()

    def kill(command: str) -> None:
        is_later = moment != "squeue" or any("scancel" in line for line in run.slurm.sent)
        if command.startswith(moment) and is_later:
            raise Killed

    run.slurm.before = kill
    with pytest.raises(Killed):
        run.act(made)
    assert run.kinds == ["requeue"]
    run.slurm.before = lambda command: None
    run()
    job = run.slurm.jobs[21]
    assert job.priority > 0
    if moment == "scontrol update":
        assert (job.state, job.features) == ("PENDING", "h100")
        assert run.kinds == ["requeue", "place", "placed"]
    else:
        assert (job.state, job.features) == ("RUNNING", "[a100|h100]")
        assert run.kinds == ["requeue", "stopped"]


def test_a_job_that_requeues_itself_on_the_signal(tmp_path: Path) -> None:
    run = slow(start(tmp_path, running(21)))
    made = run.plan()

    def requeue(command: str) -> None:
        job = run.slurm.jobs[21]
        if command.startswith("squeue -a --json") and run.slurm.sent and job.state == "RUNNING":
            job.state, job.reason, job.nodes, job.restarts = "PENDING", "BeginTime", "", 1

    run.slurm.before = requeue
    assert run.act(made) == JobOutcome(requeued=1)
    assert run.story[-1] == f"requeued: {SOONER} (1, 0.100)"
    assert run.slurm.sent == ["scancel --signal=USR1 --batch 21", "scontrol update jobid=21 Features=h100"]


def test_a_job_that_ends_on_the_signal_is_not_requeued(tmp_path: Path) -> None:
    run = slow(start(tmp_path, running(21)))
    made = run.plan()
    run.slurm.before = lambda command: (
        run.slurm.jobs.clear() if command.startswith("squeue -a --json") and run.slurm.sent else None
    )
    assert run.act(made) == JobOutcome(stopped=1)
    assert run.kinds == ["requeue", "stopped"]
