"""Running jobs as the watch saw them: published for their owners alone, and shown by `almanac jobs`."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from advisor.watch.actions import PastStep
from advisor.watch.round import GPUS, JOBS, Round, WatchFinding
from almanac.config import Config
from almanac.config_file import parse_config
from almanac.published.outgoing import Outgoing
from cli.app import App
from cli.jobs import command
from reports.published.caller import PublishedJobs
from reports.published.live import LIFETIME_S, LIVE, LiveJob, all_live, live_jobs, publish_live

NOW_S = 1_795_464_000
UIDS = {"ann": os.getuid(), "bob": os.getuid() + 1}
ROW: dict[str, Any] = {
    "submit_s": 10, "restarts": 0, "account": "a", "partition": "gpu", "node_count": 1, "gpu_count": 4,
    "start_s": NOW_S - 9000, "is_interactive": False, "is_shared": False, "is_serving": False,
}  # fmt: skip
SAYS = "if it waits for nothing, end it: scancel 7"


def a_round() -> Round:
    """Jobs 7 (two of four GPUs idle), 8 (an array task without samples) of ann, and 9 of bob, with a hostile name."""
    jobs = [
        {**ROW, "job_id": 7, "user": "ann", "name": "train"},
        {**ROW, "job_id": 8, "user": "ann", "name": None, "array_job_id": 6, "array_task_id": 2, "gpu_count": 1},
        {**ROW, "job_id": 9, "user": "bob", "name": "\x1b[2J" + "x" * 999},
    ]
    gpus = [
        {**{field.name: math.nan for field in GPUS}, "job": job, "host": "n1", "gpu": str(gpu), "gpu_util_pct": util,
         "hbm_used_mib": used, "hbm_total_mib": 81920.0, "sample_count": samples}
        for job, gpu, util, used, samples in (
            (0, 0, 90.0, 40960.0, 4), (0, 1, 70.0, 20480.0, 4), (0, 2, 0.0, math.nan, 4), (0, 3, math.nan, 1.0, 4),
            (1, 4, 5.0, 5.0, 0), (2, 5, 50.0, 1024.0, 4),
        )
    ]  # fmt: skip
    return Round(NOW_S, 120, pa.Table.from_pylist(jobs, JOBS), pa.Table.from_pylist(gpus, GPUS))


IDLE = WatchFinding(7, 0, "unused_gpus", NOW_S - 2400, NOW_S, 1.0, {"gpu_count": 2}, SAYS)
XID = WatchFinding(7, 0, "xid", NOW_S - 60, NOW_S, 1.0, {}, "tell the operators")


def test_a_job_has_its_own_figures_and_the_gravest_finding_first() -> None:
    train, task, hostile = live_jobs(a_round(), [IDLE, XID])
    assert (train.gpus_seen, train.gpu_util_pct, train.hbm_used_mib, train.hbm_total_mib) == (4, 53.3, 40960, 81920)
    assert (train.kinds, train.says) == (("xid", "unused_gpus"), "tell the operators")
    assert (train.idle_gpus, train.idle_s) == (2, 2400)
    assert task == LiveJob(8, "6_2", "ann", "gpu", "", 1, NOW_S - 9000), "without samples nothing is known, not zero"
    assert len(hostile.name) == 200


def test_a_job_that_does_no_work_says_when_it_will_be_cancelled(tmp_path: Path) -> None:
    def warned(since_s: int = NOW_S - 2400, kind: Any = "hang", what: Any = "warned") -> PastStep:
        return PastStep(what, kind, since_s, NOW_S + 900)

    hang = WatchFinding(7, 0, "hang", NOW_S - 2400, NOW_S, 1.0, {}, SAYS)
    past = {(7, 10, 0): [warned()], (8, 10, 0): [warned()], (9, 10, 1): [warned()]}
    jobs = live_jobs(a_round(), [hang, XID], past)
    assert [job.cancel_s for job in jobs] == [NOW_S + 900, None, None]
    assert live_jobs(a_round(), [XID], past)[0].cancel_s is None
    for other in (warned(NOW_S - 2401), warned(kind="idle"), warned(what="warn")):
        assert live_jobs(a_round(), [hang], {(7, 10, 0): [other]})[0].cancel_s is None
    publish_live(Outgoing(tmp_path), "c", NOW_S, jobs, UIDS.get)
    shown = " ".join(run(Outgoing(tmp_path), "--running").stdout.split())
    assert "job 7 will be cancelled after 2026-11-23 20:15: tell the operators" in shown


@pytest.fixture
def folder(tmp_path: Path) -> Outgoing:
    found = Outgoing(tmp_path)
    assert publish_live(found, "c", NOW_S, live_jobs(a_round(), [IDLE]), UIDS.get) == 2
    return found


def test_each_user_gets_their_own_jobs_and_none_that_ended(folder: Outgoing) -> None:
    own = PublishedJobs(folder.root, UIDS["ann"])
    found = own.live(NOW_S + LIFETIME_S - 1)
    assert found and [job.job_id for job in found.jobs] == [7, 8]
    assert own.live(NOW_S + LIFETIME_S) is None and own.live(NOW_S - 301) is None
    every = all_live(folder, NOW_S)
    assert every and [job.job_id for job in every.jobs] == [7, 8, 9]
    assert publish_live(folder, "c", NOW_S + 120, every.jobs[2:], UIDS.get) == 1
    assert own.live(NOW_S + 120) is None
    assert folder.read(str(UIDS["bob"]), LIVE.name)


class _Login(App):
    """A login node with the client package, and ann at it."""

    @property
    def config(self) -> Config:  # type: ignore[override]
        return parse_config({"hooks": {"advice_dir": self.store_path}})

    @property
    def caller(self) -> str:
        return "ann"

    @property
    def is_operator(self) -> bool:
        return False

    @property
    def may_read_store(self) -> bool:
        return False

    @property
    def caller_jobs(self) -> PublishedJobs:  # type: ignore[override]
        return PublishedJobs(Path(self.store_path or ""), UIDS["ann"])

    def now_s(self) -> int:
        return NOW_S + 60


def run(folder: Outgoing, *argv: str) -> Result:
    return CliRunner().invoke(command, list(argv), obj=_Login(store_path=str(folder.root)))


def test_running_jobs_have_a_column_of_what_they_do_now(folder: Outgoing) -> None:
    said = run(folder, "--running").output
    assert [line.split() for line in said.splitlines()[1:4]] == [
        ["job", "name", "GPUs", "time", "util", "memory", "now"],
        ["7", "train", "4", "2h", "31m", "53%", "40/80", "GiB", "2", "GPUs", "idle", "40", "min"],
        ["6_2", "-", "1", "2h", "31m", "-", "-", "?"],
    ]
    assert said.splitlines()[4] == f"job 7: {SAYS}" and max(map(len, said.splitlines())) <= 80
    found = json.loads(run(folder, "--running", "--json").output)
    assert found["as_of_s"] == NOW_S and [job["job"] for job in found["jobs"]] == ["7", "6_2"]
    assert run(folder, "--running", "-a").exception, "everybody's are for operators"
    assert run(folder, "--running", "-n", "3").exit_code == 2
    folder.remove(str(UIDS["ann"]), [LIVE.name])
    assert "not known" in run(folder, "--running").output
    assert json.loads(run(folder, "--running", "--json").output) == {"as_of_s": None, "jobs": []}
