"""The to-do list of the site report: who wastes what, the change since the span before, and whether advice is followed.

Each figure can be worked out by hand.
"""

from __future__ import annotations

import csv
import dataclasses
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import Config, Filters, Tier
from reports.site.faults import FaultItem, FaultSum, LimitItem
from reports.site.page import render_site_page
from reports.site.report import AdviceOutcome, AdviceUse, SiteReport, build_site_report, pseudonym, site_key
from reports.site.tables import advice_table, compared_with, coverage_table, faults_table, summary_boxes, write_csv
from reports.site.tasks import request_tasks, waste_tasks
from telemetry.site import Site
from telemetry.store.schema import TABLES
from telemetry.store.store import JOBS_FROM, Store

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
    jobs_from_s: int = 0, config: Config | None = None, **more: Any,
) -> SiteReport:  # fmt: skip
    store = Store.create(root / "store")
    for name, rows in (("jobs", jobs), ("job_metrics", metrics), ("advice", advice or [])):
        if rows:
            store.of("c").write(name, pa.Table.from_pylist(rows, schema=TABLES[name].schema))
    store.of("c").set_watermark("sacct", mark_s)
    store.of("c").set_watermark(JOBS_FROM, jobs_from_s)
    options = {"has_names": True, "has_study": False, **more}
    return build_site_report(Site.of(store.of("c"), config or Config(tiers=TIERS), NOW_S), SPAN_S, **options)


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


def test_gpus_that_nobody_asked_for_are_a_fault_of_their_own(tmp_path: Path) -> None:
    """Whole nodes come with all their GPUs. Unknown is not: asked for none.

    Of each user, the GPUs asked for and the utilization, and what is found: a fault, what to do, and hours.
    """
    unasked, exclusive = "GPUs not asked for", "leave out --exclusive, or to use a partition without GPUs"
    find = "check that their program finds the GPUs, or to request none"
    fewer = "request 1 GPU instead of 4, or to use all 4"
    cases: dict[str, tuple[int | None, float, str, str, float]] = {
        "u1": (0, 0, unasked, exclusive, 40), "u2": (1, 0, unasked, exclusive, 30), "u3": (3, 0, "idle job", find, 30),
        "u4": (None, 0, "idle job", find, 40), "u5": (1, 50, unasked, "leave out --exclusive, or to use all 4", 30),
        "u6": (0, 50, unasked, "leave out --exclusive, or to use all 4", 30),
        "u7": (4, 50, "GPUs never used", fewer, 30), "u8": (None, 50, "GPUs never used", fewer, 30),
    }  # fmt: skip
    jobs = [job(n, 4, 10, user=user, gpu_count_req=case[0]) for n, (user, case) in enumerate(cases.items(), 1)]
    metrics = [
        measured(n, util, verdict="ok" if util else "idle", idle_gpus=[f"n:{gpu}" for gpu in range(3 if util else 4)])
        for n, (_, util, *_) in enumerate(cases.values(), 1)
    ]
    report = report_of(tmp_path, jobs, metrics)
    found = {item.user: (item.fault, round(item.hours, 6)) for item in report.faults.items}
    assert found == {user: (fault, hours) for user, (_, _, fault, _, hours) in cases.items()}
    said = {task.action for task in waste_tasks(report, 9)}
    assert said == {f"Ask {user} to {action}." for user, (_, _, _, action, _) in cases.items()}


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
    known = {"gpus_seen": 2, "is_preallocated": False}
    report = report_of(tmp_path, jobs, [measured(n, 90, hbm_peak_mib=peak, **known) for n, peak in peaks.items()])
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
    [(OLDER[1:], NOW_S, "the store has jobs from 2026-05-24 on"),
     (OLDER, NOW_S - 2 * DAY_S, "accounting was read up to 2026-06-06 only"),
     ([{**OLDER[0], "end_s": None, "state": "RUNNING"}], NOW_S, "no GPU job was submitted and ended in it")],
)  # fmt: skip
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
    outcomes = [("followed", 2, 6.0), ("another tier", 1, 2.0), ("asked for more memory", 1, 10.0)]
    outcomes.append(("no tier named", 1, 2.0))
    assert report.advice == AdviceUse(tuple(AdviceOutcome(*each) for each in outcomes), smaller_hours=6.0)
    table = advice_table(report)
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
    report = build_site_report(Site.of(reported.store.of("test"), reported.config, 2_000_000_000), (0, 2_000_000_000))
    assert report.faults.sums
    assert 0 < report.faults.unused_hours <= (report.totals.total.unused_hours or 0)
    assert sum(item.hours for item in report.faults.items) == pytest.approx(report.faults.hours)
    assert sum(each.jobs for each in report.faults.sums) <= report.totals.total.jobs


SIZE = {"node_cpu_count": 64, "node_gpu_count": 4, "node_memory_mib": 262_144, "node_threads": 1, "node_count": 1}
SERIAL = {"gpu_count_req": 0, "cpu_count": 8, "cpu_time_s": 36_000.0, "host_mem_peak_mib": 1000.0, **SIZE}


def test_requests_for_cpus_memory_and_nodes_are_one_entry_for_each_user_and_fault(tmp_path: Path) -> None:
    """Jobs without GPUs count, and staff and users without a name do not. Job names are never shown."""
    jobs = [
        *(job(number, 0, 10, user="gil", name="<b>\x1b[31m", **SERIAL) for number in (21, 22)),
        job(23, 0, 10, user="", **SERIAL), job(24, 0, 10, user="sam", account="s", **SERIAL),
        job(25, 1, 10, user="hal", cpu_count=48, cpu_time_s=36_000.0, **SIZE),  # 3 times its GPU's part of the CPUs
        job(26, 1, 10, user="ida", cpu_count=48, cpu_time_s=36_000.0, **SIZE),  # the same, and its GPU did nothing
        job(27, 4, 10, user="<i>", cpu_count=16, host_mem_alloc_mib=1000.0, **SIZE | {"node_count": 4}),
    ]  # fmt: skip
    config = Config(filters=Filters(staff_accounts=("s",)))
    report = report_of(tmp_path, jobs, [measured(26, 0, verdict="idle", gpus_seen=1)], config=config)
    assert [(task.action, task.why) for task in request_tasks(report, 9)] == [
        ("Ask <i> for fewer nodes with more GPUs on each.",
         "30 node-hours more than needed: 1 job (spread_gpus). Largest: job 27."),
        ("Ask hal for fewer CPUs per GPU.",
         "20 GPU-hours kept from other jobs: 1 job (cpus_per_gpu). Largest: job 25."),
        ("Ask gil to request 1 CPU for a serial program, or to run it in parallel.",
         "140 CPU-hours not used: 2 jobs (serial_program). Largest: job 22."),
    ]  # fmt: skip
    page = render_site_page(report)
    assert "Ask &lt;i&gt; for fewer" in page and "<i>" not in page and "[31m" not in page
    nameless = dataclasses.replace(report, has_names=False, shown_user=lambda user: "x")
    said = " ".join(f"{task.action} {task.why}" for task in request_tasks(nameless, 9))
    assert said.count("Ask x ") + said.count("Ask user-") == 3
    assert not re.search(r"hal|gil|<i>|Largest", said)
    write_csv(nameless, tmp_path / "csv")
    rows = [*csv.DictReader((tmp_path / "csv/host_faults.csv").read_text().splitlines())]
    assert [(row["rule"], row["user"], row["amount"], row["unit"], row["example_job"]) for row in rows] == [
        ("spread_gpus", "x", "30.0", "node-hours", ""), ("cpus_per_gpu", "x", "20.0", "GPU-hours", ""),
        ("serial_program", "x", "140.0", "CPU-hours", ""),
    ]  # fmt: skip
