"""The to-do list of the site report: who wastes what, the change since the span before, and whether advice is followed.

Each figure can be worked out by hand.
"""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import Config, Tier
from reports.site.advice_use import AdviceOutcome, AdviceUse
from reports.site.faults import FaultItem, FaultSum, LimitItem
from reports.site.page import render_site_page
from reports.site.pseudonyms import pseudonym, site_key
from reports.site.report import SiteReport, build_site_report
from reports.site.summary import advice_table, compared_with, coverage_table, faults_table, summary_boxes
from reports.site.tables import write_csv
from reports.site.tasks import request_tasks, waste_tasks
from reports.site.words import PageTable
from telemetry.store.cluster_store import JOBS_FROM
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

DAY_S, HOUR_S = 86_400, 3600
T0 = 1_780_012_800 // DAY_S * DAY_S
SPAN_S = (T0, T0 + 10 * DAY_S)
NOW_S = SPAN_S[1]
TIERS = tuple(Tier(name=f"hbm{size}g", capacity_mib=size * 1024, constraint=f"hbm{size}g") for size in (40, 80))


def job(number: int, gpus: int, hours: float, at_s: int = T0 + DAY_S, **more: Any) -> dict[str, Any]:
    return {
        "job_id": number, "submit_s": at_s, "start_s": at_s, "end_s": at_s + round(hours * HOUR_S),
        "elapsed_s": round(hours * HOUR_S), "gpu_count": gpus, "user": "alice", "account": "a", "partition": "gpu",
        "state": "COMPLETED", "name_key": f"job{number}", **more,
    }  # fmt: skip


def measured(number: int, util_pct: float, at_s: int = T0 + DAY_S, **more: Any) -> dict[str, Any]:
    return {
        "job_id": number, "submit_s": at_s, "verdict": "ok", "coverage_frac": 1.0, "idle_gpus": [], "gpus_seen": 4,
        "mean_gpu_util_pct": util_pct, "temporal_imbalance": 0.1, **more,
    }  # fmt: skip


IDLE_3 = {"idle_gpus": ["n:1", "n:2", "n:3"]}
JOBS = [
    job(1, 4, 10),  # one GPU at 80%, three never used: 30 GPU-hours
    job(2, 4, 5),  # one GPU at 12%, three never used: the same fault, 15 GPU-hours; its pauses do not count again
    job(3, 4, 5, user="bob"),  # all four at 10%: 18 GPU-hours
    job(4, 4, 1, user="bob"),  # all four at 40%: no fault, 2.4 unused GPU-hours
    job(5, 1, 7, user="carol"),  # did nothing
    *(job(number, 2, 2, user="dan", state="FAILED", name_key="x") for number in (6, 7, 8)),
    job(9, 2, 50, user="dan", state="FAILED", name_key="y"),  # failed once
    *(job(number, 2, 60, user="eve", state="FAILED", name_key="z", account="s") for number in (10, 11, 12)),
    job(13, 8, 100, user="fay"),  # no telemetry
]
METRICS = [
    measured(1, 20, **IDLE_3), measured(2, 3, **IDLE_3), measured(3, 10), measured(4, 40),
    measured(5, 0.2, verdict="idle", gpus_seen=1), measured(6, 90, gpus_seen=2),
    measured(7, 0.1, verdict="idle", gpus_seen=2), measured(8, 90, gpus_seen=2),
    *(measured(number, 0, verdict="staff") for number in (10, 11, 12)),
]  # fmt: skip


def report_of(
    root: Path, jobs: list[Any], metrics: list[Any], advice: list[Any] | None = None, mark_s: int = NOW_S,
    jobs_from_s: int = 0, **more: Any,
) -> SiteReport:  # fmt: skip
    store = Store.create(root / "store")
    for name, rows in (("jobs", jobs), ("job_metrics", metrics), ("advice", advice or [])):
        if rows:
            store.of("c").write(name, pa.Table.from_pylist(rows, schema=TABLES[name].schema))
    store.of("c").set_watermark("sacct", mark_s)
    store.of("c").set_watermark(JOBS_FROM, jobs_from_s)
    options = {"has_names": True, "has_study": False, **more}
    return build_site_report(store.of("c"), Config(tiers=TIERS), SPAN_S, NOW_S, **options)


def test_each_job_counts_once_for_its_largest_fault(tmp_path: Path) -> None:
    report = report_of(tmp_path, JOBS, METRICS)
    items = {item.key: item for item in report.faults.items}
    assert list(items) == [
        ("GPUs never used", "alice", 4), ("low use", "bob", 4), ("failed again", "dan", 2), ("idle job", "carol", 1),
    ]  # fmt: skip
    alice = items["GPUs never used", "alice", 4]
    assert alice == FaultItem(*alice.key, 2, 45.0, 1, 1, pytest.approx((8 + 0.6) / 15), 1)
    assert items["low use", "bob", 4].busy_frac == pytest.approx(0.1)
    assert report.faults.sums == (
        FaultSum("GPUs never used", 2, 1, 45.0, 45.0),
        FaultSum("low use", 1, 1, 18.0, 18.0),
        FaultSum("failed again", 2, 1, 8.0, pytest.approx(4 + 0.4)),  # one did nothing, the other was 90% busy
        FaultSum("idle job", 1, 1, 7.0, 7.0),
    )
    # What is left: pauses of alice's used GPUs, bob's other job, and the first failure.
    unused = report.totals.total.unused_hours or 0
    assert unused - report.faults.unused_hours == pytest.approx(15 - 8.6 + 2.4 + 0.4)
    assert faults_table(report).note == (
        "Together 78 GPU-hours: 74.4 of 83.6 unused GPU-hours, and 3.6 of failed jobs that used their GPUs or were "
        "not measured."
    )


def test_each_entry_says_what_to_ask_of_whom_and_then_why(tmp_path: Path) -> None:
    assert [(task.action, task.why) for task in waste_tasks(report_of(tmp_path, JOBS, METRICS), 9)] == [
        ("Ask alice to request 1 GPU instead of 4, or to use all 4.",
         "45 GPU-hours: 2 jobs used 1 of 4 GPUs. Largest: job 1."),
        ("Ask bob what the GPUs wait for: data, the CPU, or small batches.",
         "18 GPU-hours: 1 job kept 4 GPUs busy 10% of the time. Largest: job 3."),
        ("Help dan find why the jobs fail, with one short test job.",
         "8 GPU-hours: 2 jobs on 2 GPUs failed after the same job had failed before. Largest: job 8."),
        ("Ask carol to check that their program finds the GPU, or to request none.",
         "7 GPU-hours: 1 job on 1 GPU did nothing. Largest: job 5."),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "util_pct", "idle", "fault", "action"),
    [
        (0, 0, 4, "GPUs not asked for", "Ask alice to leave out --exclusive, or to use a partition without GPUs."),
        (1, 0, 4, "GPUs not asked for", "Ask alice to leave out --exclusive, or to use a partition without GPUs."),
        (3, 0, 4, "idle job", "Ask alice to check that their program finds the GPUs, or to request none."),
        (None, 0, 4, "idle job", "Ask alice to check that their program finds the GPUs, or to request none."),
        (1, 50, 3, "GPUs not asked for", "Ask alice to leave out --exclusive, or to use all 4."),
        (0, 50, 3, "GPUs not asked for", "Ask alice to leave out --exclusive, or to use all 4."),
        (4, 50, 3, "GPUs never used", "Ask alice to request 1 GPU instead of 4, or to use all 4."),
        (None, 50, 3, "GPUs never used", "Ask alice to request 1 GPU instead of 4, or to use all 4."),
    ],
)
def test_gpus_that_nobody_asked_for_are_a_fault_of_their_own(
    tmp_path: Path, asked: int | None, util_pct: float, idle: int, fault: str, action: str
) -> None:
    """Whole nodes come with all their GPUs. Unknown is not: asked for none."""
    names = [f"n:{number}" for number in range(idle)]
    metrics = [measured(1, util_pct, verdict="ok" if util_pct else "idle", idle_gpus=names)]
    report = report_of(tmp_path, [job(1, 4, 10, gpu_count_req=asked)], metrics)
    [task], [item] = waste_tasks(report, 9), report.faults.items
    assert (item.fault, task.action) == (fault, action)
    assert item.hours == pytest.approx(40 if idle == 4 and not asked else 30)


def test_jobs_on_parts_of_gpus_are_left_out_by_name(tmp_path: Path) -> None:
    parts = [job(number, 0, 1, gpu_share_count=8) for number in (2, 3)]
    report = report_of(tmp_path, [job(1, 4, 10), *parts], [measured(1, 90)])
    assert report.totals.total.jobs == 1
    assert "0 jobs that had not ended, and 2 jobs on parts of GPUs (shard, mps)." in coverage_table(report).note


def test_gpus_that_nobody_could_count_are_not_guessed(tmp_path: Path) -> None:
    """Two of the job's four GPUs had no samples, and one of the others was never used."""
    report = report_of(tmp_path, JOBS[:1], [measured(1, 50, gpus_seen=2, idle_gpus=["n:1"])])
    [task] = waste_tasks(report, 9)
    assert task.action == "Ask alice to request fewer GPUs instead of 4, or to use all 4."
    assert task.why.startswith("20 GPU-hours: 1 job never used some of 4 GPUs.")


def test_long_time_limits_and_large_tiers_are_requests_and_win_no_gpu_hours(tmp_path: Path) -> None:
    jobs = [job(number, 2, number, time_limit_s=10 * HOUR_S, tier="hbm80g") for number in (1, 2, 4)]
    jobs += [job(5, 2, 6, time_limit_s=10 * HOUR_S), job(6, 2, 1, time_limit_s=10 * HOUR_S, state="CANCELLED")]
    jobs += [job(7 + number, 2, 0.1, user="bob", time_limit_s=HOUR_S - 1) for number in range(3)]
    jobs += [job(10 + number, 2, 0.1, user="dan", time_limit_s=HOUR_S) for number in range(2)]
    peaks = {1: 1000.0, 2: 2000.0, 4: 70_000.0}
    report = report_of(
        tmp_path,
        jobs,
        [measured(number, 90, gpus_seen=2, hbm_peak_mib=peak, is_preallocated=False) for number, peak in peaks.items()],
    )
    assert report.faults.limits == (LimitItem("alice", 2, 3, 2 * (9 + 8 + 6), 0.2),)
    assert [(task.action, task.why) for task in request_tasks(report, 5)] == [
        ("Ask alice to request hbm40g for the jobs that fit in it.",
         "6 GPU-hours on hbm80g: 2 of 3 jobs with a known peak fit in hbm40g."),
        ("Ask alice for shorter time limits.",
         "46 GPU-hours requested and not used: 3 jobs on 2 GPUs ran for 20% of the time limit (median)."),
    ]  # fmt: skip
    assert (waste_tasks(report, 9), report.faults.hours) == ([], 0)


BEFORE_S = T0 - 5 * DAY_S
OLDER = [job(100, 4, 1, T0 - 10 * DAY_S, user="zoe"), job(101, 4, 5, BEFORE_S), job(102, 4, 4, BEFORE_S, user="zoe")]
OLDER_METRICS = [
    measured(100, 90, T0 - 10 * DAY_S), measured(101, 20, BEFORE_S, **IDLE_3), measured(102, 90, BEFORE_S),
]  # fmt: skip
NOW = JOBS[:2], METRICS[:2]


def test_the_span_before_counts_what_a_report_would_have_said_then(tmp_path: Path) -> None:
    """A job that ended later is left out, as the jobs that run now are."""
    later = [job(103, 4, 999, BEFORE_S, user="late")]
    report = report_of(tmp_path, NOW[0] + OLDER + later, NOW[1] + OLDER_METRICS)
    assert report.before.total
    assert (report.before.total.jobs, report.before.total.hours) == (3, 40.0)
    assert report.before.faults == {"GPUs never used": pytest.approx(15)}
    assert "Before: 15." in waste_tasks(report, 1)[0].why
    assert faults_table(report).cells[1] == ["GPUs never used", "2", "1", "45", "15"]
    notes = {words: note for _, words, note in summary_boxes(report)}
    assert notes["GPU-hours"] == "100% measured; +50% from before"
    util = (20 * 0.9 + 20 * 0.2) / 40
    assert notes["average utilization"] == f"{100 * ((40 * 0.2 + 20 * 0.03) / 60 - util):+.1f} points from before"
    assert compared_with(report).startswith("Compared with 2026-")


@pytest.mark.parametrize(
    ("older", "mark_s", "why"),
    [
        (OLDER[1:], NOW_S, "the store has jobs from 2026-05-24 on"),
        (OLDER, NOW_S - 2 * DAY_S, "accounting was read up to 2026-06-06 only"),
        ([{**OLDER[0], "end_s": None, "state": "RUNNING"}], NOW_S, "no GPU job was submitted and ended in it"),
    ],
)
def test_a_span_that_the_store_does_not_know_is_not_compared(
    tmp_path: Path, older: list[Any], mark_s: int, why: str
) -> None:
    report = report_of(tmp_path, NOW[0] + older, NOW[1] + OLDER_METRICS, mark_s=mark_s)
    assert report.before.why_none == why
    assert f"not known, because {why}." in compared_with(report)
    assert "Before" not in waste_tasks(report, 1)[0].why + "".join(faults_table(report).columns)
    assert "from before" not in str(summary_boxes(report))


def test_a_span_whose_jobs_were_removed_is_not_compared(tmp_path: Path) -> None:
    """A pending job keeps its day, which once looked like a store that knows all jobs since then."""
    since_s = BEFORE_S // DAY_S * DAY_S + 9 * DAY_S
    report = report_of(tmp_path, NOW[0] + OLDER, NOW[1] + OLDER_METRICS, jobs_from_s=since_s)
    assert report.before.why_none.startswith("the store has jobs from ")


def test_use_is_not_compared_with_a_span_that_was_measured_less(tmp_path: Path) -> None:
    report = report_of(tmp_path, NOW[0] + OLDER, NOW[1] + OLDER_METRICS[:2])
    assert report.before.why_no_use == "60% of its GPU-hours were measured, and now 100% are"
    assert [cells[-1] for cells in faults_table(report).cells] == ["not known"] * 4 + ["0"]
    assert "from before" in summary_boxes(report)[1][2]
    assert "points" not in str(summary_boxes(report))


def test_without_telemetry_nothing_is_said_to_be_0(tmp_path: Path) -> None:
    report = report_of(tmp_path, JOBS, [])
    assert [cells[1:] for cells in faults_table(report).cells] == [["not known"] * 3] * 4 + [["4", "2", "248"]]
    page = render_site_page(report_of(tmp_path / "other", JOBS[:1], []))
    assert "Not known: no job was measured." in page
    assert "Nothing:" not in page


def advised(number: int, asked: str | None, hours: float = 1, **more: Any) -> dict[str, Any]:
    return job(number, 2, hours, gpu_count_req=2, name_key="train", tier=asked, **more)


def test_advice_followed_and_the_gpu_hours_that_it_can_have_freed(tmp_path: Path) -> None:
    common = {"published_s": T0, "user": "alice", "version": "1", "expires_s": T0 + 9 * DAY_S}
    row = {**common, "kind": "F", "name_key": "train", "gpu_count": 2, "predicted_s": 9, "tier": "hbm40g"}
    advice = [{**common, "kind": "file", "name_key": "", "gpu_count": 0}, row]
    jobs = [
        advised(1, "hbm40g", 3), advised(2, "hbm80g", 5), advised(3, None), advised(4, "gone"),
        advised(5, "hbm40g", state="RUNNING", end_s=None, elapsed_s=None), advised(6, "hbm40g", user="bob"),
        {**advised(7, None), "gpu_count_req": 0},  # got its GPUs with whole nodes
    ]  # fmt: skip
    report = report_of(tmp_path, jobs, [], advice)
    assert report.advice == AdviceUse(
        (
            AdviceOutcome("followed", 2, 6.0),
            AdviceOutcome("another tier", 1, 2.0),
            AdviceOutcome("asked for more memory", 1, 10.0),
            AdviceOutcome("no tier named", 1, 2.0),
        ),
        smaller_hours=6.0,
    )
    table = advice_table(report)
    assert isinstance(table, PageTable)
    assert table.cells[0] == ["followed", "2", "40%", "6"]
    assert "6 GPU-hours on smaller tiers than hbm80g. At most these were freed" in table.note
    assert "1 job (10 GPU-hours) asked for more memory than advised." in table.note
    assert advice_table(dataclasses.replace(report, advice=AdviceUse())) == (
        "No job of this span had published advice on its memory tier (almanac publish)."
    )


def test_names_and_jobs_are_shown_only_when_asked_for_and_are_inert(tmp_path: Path) -> None:
    hostile = '=<img src=x onerror="1">\x1b[31m\u202e' + "A" * 500
    jobs = [{**each, "user": hostile} for each in JOBS[:1]]
    named = report_of(tmp_path, jobs, METRICS[:1])
    page = render_site_page(named)
    assert "=&lt;img src=x" in page
    assert "<img src=x" not in page
    assert "\x1b" not in page + "".join(task.action for task in waste_tasks(named, 9))
    assert max(len(task.action) for task in waste_tasks(named, 9)) < 120
    secret = report_of(tmp_path / "other", jobs, METRICS[:1], has_names=False)
    assert pseudonym(hostile, site_key(tmp_path / "other/store")) in render_site_page(secret)
    for report, user, example in ((named, "'=<img", "1"), (secret, "user-", "")):
        path = next(path for path in write_csv(report, tmp_path / f"csv{example}") if path.stem == "to_do")
        with path.open(newline="") as lines:
            [row] = csv.DictReader(lines)
        assert row["user"].startswith(user)
        assert row["example_job"] == example
        assert "\x1b" not in row["user"]


def test_in_the_whole_site_no_gpu_hour_counts_twice(reported: Any) -> None:
    report = build_site_report(reported.store.of("test"), reported.config, (0, 2_000_000_000), 2_000_000_000)
    assert report.faults.sums
    assert 0 < report.faults.unused_hours <= (report.totals.total.unused_hours or 0)
    assert sum(item.hours for item in report.faults.items) == pytest.approx(report.faults.hours)
    assert sum(each.jobs for each in report.faults.sums) <= report.totals.total.jobs
