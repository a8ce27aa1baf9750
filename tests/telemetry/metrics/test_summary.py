"""From a store's jobs and samples to its metrics, by hand: whose samples are whose, and what is looked at again."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from made_site import DAY, T0_S, Rows, Site, is_same, job, prolog, samples

from almanac.errors import DamageWarning
from telemetry.attribution.allocations import DOUBLY_BOUND, UNBOUND
from telemetry.store.progress import day_text


def node(host: str, first_h: float, last_h: float, **given: Any) -> Rows:
    """Samples of both GPUs of a node."""
    return [row for gpu in (0, 1) for row in samples(host, gpu, first_h, last_h, **given)]


def two_days() -> list[Rows]:
    """n1 and n2: two GPUs each. n3: one GPU, in two MIG instances. A sample every ten minutes of two days."""
    return [
        node("n1", 0, 48), samples("n2", 0, 0, 1, util=0.0), samples("n2", 0, 1, 3, util=80.0, hbm=2000.0, label=2),
        samples("n2", 0, 3, 48, util=0.0), samples("n2", 1, 0, 2, util=0.0),
        samples("n2", 1, 2, 4, util=40.0, hbm=3000.0, label=3), samples("n2", 1, 4, 48, util=0.0),
        samples("n3", 0, 0, 48, util=20.0, hbm=500.0, mig="1"), samples("n3", 0, 0, 48, util=60.0, hbm=700.0, mig="2"),
    ]  # fmt: skip


def all_jobs() -> list[dict[str, Any]]:
    return [
        job(1, 1, 2, "n1", 2), job(2, 1, 3, "n2", 1), job(3, 2, 4, "n2", 1), job(4, 23, 25, "n1", 2),
        job(5, 4, 5, "n1", 2, state="REQUEUED"), job(5, 6, 6.5, "n1", 2), job(7, 9, 11, "n3", 2),
        job(8, 30, None, "n1", 2), job(9, 1, 2, "n1", 0),
    ]  # fmt: skip


@pytest.fixture
def filled(site: Site) -> Site:
    site.telemetry(*two_days())
    site.jobs(*all_jobs())
    return site


def test_every_sample_goes_to_the_job_that_had_the_gpu(filled: Site) -> None:
    counts = filled.summarize()
    found = filled.found()
    measured = {
        key: (row["attributed_by"], row["gpus_seen"], row["samples"], row["mean_gpu_util_pct"], row["hbm_peak_mib"])
        for key, row in found.items()
    }
    assert measured == {
        (1, 1): ("whole node", 2, 12, 50.0, 1000.0),
        (2, 1): ("label", 1, 12, 80.0, 2000.0),
        (3, 2): ("label", 1, 12, 40.0, 3000.0),
        (4, 23): ("whole node", 2, 24, 50.0, 1000.0),
        (5, 4): ("whole node", 2, 12, 50.0, 1000.0),
        (5, 6): ("whole node", 2, 6, 50.0, 1000.0),
        (7, 9): ("whole node", 2, 24, None, 700.0),
    }
    assert found[7, 9]["mean_gr_engine_active_frac"] is None  # nobody knows how many engines its slices have
    assert filled.gpus(7) == [("n3", 0, "1"), ("n3", 0, "2")]
    assert filled.gpus(2) == [("n2", 0, "")]
    assert {row["expected_samples"] for (job_id, _), row in found.items() if job_id == 4} == {24.0}
    # Six units, 288 samples each, of which the jobs have 12 + 12 + 12 + 24 + 12 + 6 + 24.
    assert (counts.jobs, counts.samples, counts.samples_without_job) == (7, 1728, 1728 - 102)
    assert counts.verdicts == {"ok": 7}
    assert counts.attributed_by == {"whole node": 5, "label": 2}
    assert counts.days == [day_text(DAY), day_text(DAY + 1)]
    assert filled.open_days == []


def test_nothing_new_opens_nothing_and_computes_nothing(filled: Site) -> None:
    filled.summarize()
    assert filled.telemetry(*two_days()) == []
    assert filled.jobs(*all_jobs()) == []
    counts = filled.summarize()
    assert (counts.jobs, counts.samples, counts.days) == (0, 0, [])


def test_a_span_is_computed_whether_or_not_it_has_changed(filled: Site) -> None:
    filled.summarize()
    counts = filled.summarize(T0_S + 24 * 3600, T0_S + 30 * 3600)
    # The whole of job 4 is computed; samples are counted in the span: 6 units, 36 samples; 12 of job 4.
    assert (counts.jobs, counts.samples, counts.samples_without_job) == (1, 216, 216 - 12)
    assert filled.found()[4, 23]["samples"] == 24


@pytest.mark.parametrize("is_span", [True, False])
def test_a_long_span_is_looked_at_in_parts_with_the_same_result(
    filled: Site, monkeypatch: pytest.MonkeyPatch, is_span: bool
) -> None:
    """Job 4 runs over the midnight at which the parts meet."""
    whole, tables = filled.summarize().as_dict(), filled.tables()
    for table in ("job_metrics", "gpu_metrics"):
        shutil.rmtree(filled.store.root / table)
    monkeypatch.setattr("telemetry.metrics.summary.MOST_DAYS", 1)
    filled.store.of("c").reopen([DAY, DAY + 1])
    looked_at: list[tuple[int, int]] = []
    counts = filled.summarize(
        *((None, T0_S + 10 * 86_400) if is_span else ()), progress=lambda *step: looked_at.append(step[:2])
    )
    assert looked_at[-1] == (4, 4)  # a chunk a day: both days in the first part and in the second, for job 4
    assert counts.as_dict() == {**whole, "changed_jobs": 0}
    assert is_same(filled.tables(), tables)
    assert filled.open_days == []


def step(job_id: int, name: str, submit_h: float, first_h: float, last_h: float) -> dict[str, Any]:
    submit_s, start_s, end_s = (round(T0_S + hour * 3600) for hour in (submit_h, first_h, last_h))
    return {"job_id": job_id, "submit_s": submit_s, "step": name, "start_s": start_s, "end_s": end_s, "gpu_count": 2}


def test_steps_open_the_last_day_of_their_job_only_and_old_ones_nothing(site: Site) -> None:
    long, late = job(1, 1, 80, "n1", 2), job(2, 100, 101, "n1", 2)
    own = [step(1, "0", 1, 1, 40), step(1, "1", 1, 40, 80)]
    assert site.steps(*own) == []  # read before their job: that opens its days
    assert site.jobs(long, late) == [0, 1, 2, 3, 4]
    site.summarize()
    assert site.steps(*own, step(1, "2", 1, 41, 42)) == [3]
    site.summarize()
    # Read again, as every ingest does with the newest hours, beside a new one of another job.
    assert site.steps(*own, step(2, "0", 100, 100, 101)) == [4]


def test_a_span_closes_the_days_that_lie_within_it(filled: Site) -> None:
    filled.summarize(T0_S, T0_S + 30 * 3600)
    left = filled.store.of("c").stale()
    assert (sorted(left.days), {run.job_id for run in left.runs}) == ([DAY + 1], {4, 8}), "these ran on the second day"
    assert filled.summarize(T0_S + 30 * 3600).days == []
    assert filled.summarize(None, None).days == [day_text(DAY + 1)]


def test_late_samples_open_their_day_and_change_the_jobs_that_they_touch(site: Site) -> None:
    # Hour 1 of n1 is late, so job 1 has no samples; n1 is idle on the day before and on the day after.
    late = node("n1", 1, 2)
    site.telemetry(node("n1", -24, 1), node("n1", 2, 48), *two_days()[1:])
    site.jobs(*all_jobs())
    assert site.summarize().verdicts == {"ok": 6, "no telemetry": 1}
    before = site.found()
    assert site.telemetry(late) == [0]
    # Jobs of the day: all but those of job 8, which still runs.
    counts = site.summarize()
    assert (counts.jobs, counts.days) == (7, [day_text(DAY)])
    after = site.found()
    assert {key for key in after if after[key] != before[key]} == {(1, 1)}
    assert (before[1, 1]["verdict"], after[1, 1]["verdict"], after[1, 1]["samples"]) == ("no telemetry", "ok", 12)


def test_days_apart_are_computed_apart_and_a_job_of_both_counts_once(site: Site) -> None:
    site.telemetry(node("n1", 0, 72))
    site.jobs(job(1, 1, 70, "n1", 2), job(2, 71, 72, "n1", 2))
    site.summarize()
    assert site.telemetry(node("n1", 0, 1, hbm=4.0), node("n1", 71, 72, hbm=5.0)) == [0, 2]
    counts = site.summarize()
    assert counts.jobs == counts.verdicts["ok"] == 2
    # Of day 0 one hour, of day 2 one hour are of no job, less that of job 2.
    assert (counts.samples, counts.samples_without_job) == (2 * 144 * 2, 12 + 12)
    assert site.verdicts() == {1: "ok", 2: "ok"}
    assert site.found()[2, 71]["hbm_peak_mib"] == 5.0
    assert counts.lines()[-1] == "  days that had changed: 2025-03-09, 2025-03-11"


@pytest.mark.parametrize(
    ("change", "days"),
    [({"name": "learned later", "user": "ann", "state": "FAILED"}, []), ({"account": "staff"}, [2]),
     ({"end_s": T0_S + 74 * 3600}, [2, 3]), ({"end_s": T0_S + 40 * 3600}, [1, 2]), ({"node_list": "n2"}, [0, 1, 2]),
     ({"gpu_count": 1}, [0, 1, 2]), ({"start_s": T0_S - 3600}, [-1, 0, 1, 2])],
)  # fmt: skip
def test_a_changed_record_opens_the_days_that_it_bears_on(site: Site, change: dict[str, Any], days: list[int]) -> None:
    """Whoever had the nodes differs from the earlier of both ends to the later, or all along."""
    record = job(1, 1, 60, "n1", 2, account="ml")
    assert site.jobs(record, job(2, 80, 81, "n9", 1)) == [0, 1, 2, 3]
    site.summarize()
    assert site.jobs({**record, **change}) == days


def test_a_job_opens_the_days_it_was_seen_running_and_then_that_of_its_end(site: Site) -> None:
    # Accounting knows of ends up to hour 30: nobody can have run beside job 1 after that.
    assert site.jobs(job(2, 20, 30, "n9", 1)) == [0, 1]
    assert site.jobs(job(1, -3, None, "n1", 2, state="PENDING", start_s=None)) == []
    assert site.jobs(job(1, -3, None, "n1", 2, start_s=T0_S)) == [0, 1]
    site.summarize()
    assert site.verdicts() == {2: "no telemetry"}
    assert site.jobs(job(1, -3, 60, "n1", 2, start_s=T0_S)) == [2]
    site.summarize()
    assert site.verdicts() == {1: "no telemetry", 2: "no telemetry"}


def test_an_end_that_was_learned_late_opens_the_days_since(site: Site) -> None:
    """Until then the job was taken to crowd its nodes."""
    site.telemetry(node("n1", 0, 72))
    site.jobs(job(1, 0, None, "n1", 2), job(2, 50, 51, "n1", 2))
    site.summarize()
    assert site.verdicts() == {2: UNBOUND}
    assert site.jobs(job(1, 0, 20, "n1", 2)) == [0, 1, 2]
    site.summarize()
    assert site.verdicts() == {1: "ok", 2: "ok"}


def test_a_record_without_gpus_opens_nothing_and_one_of_an_impossible_time_its_last_days(site: Site) -> None:
    assert site.jobs(job(1, 0, 40, "n1", 0)) == []
    assert len(site.jobs({**job(1, 0, 1, "n1", 2), "start_s": 1})) == 400
    assert site.jobs({**job(2, 0, 1, "n1", 2), "end_s": 2**50})[:1] == []


def test_a_new_binding_opens_the_days_of_its_job(site: Site) -> None:
    site.telemetry(node("n1", 0, 48))
    site.jobs(job(1, 20, 30, "n1", 1), job(2, 2, 3, "n1", 1))
    site.summarize()
    assert site.verdicts() == {1: UNBOUND, 2: UNBOUND}
    assert site.bindings(prolog(1, "n1", 0, 20)) == [0, 1]
    site.summarize()
    assert site.verdicts() == {1: "ok", 2: UNBOUND}
    assert site.bindings(prolog(1, "n1", 0, 20), prolog(3, "n1", 0, 20)) == []


def test_a_job_that_still_runs_crowds_its_neighbour(site: Site) -> None:
    site.telemetry(node("n1", 0, 72))
    site.jobs(job(1, 10, 11, "n1", 2), job(2, 1, None, "n1", 2))
    site.summarize()
    assert site.verdicts() == {1: UNBOUND}


def test_a_runaway_record_crowds_nobody_an_hour_after_its_time_limit(site: Site) -> None:
    site.telemetry(node("n1", 0, 72))
    site.jobs(job(1, 4, 5, "n1", 2), job(2, 0, None, "n1", 2, time_limit_s=3 * 3600), job(3, 3.5, 3.9, "n1", 2))
    site.summarize()
    assert site.verdicts() == {1: "ok", 3: UNBOUND}


def test_samples_at_a_jobs_ends_with_the_label_of_another_job_are_not_its_own(site: Site) -> None:
    """In the second in which job 2 begins, GPU 0 still shows job 1; its last sample shows job 3. One has no label."""
    sixth = 1 / 6
    site.telemetry(
        samples("n1", 0, 1, 2 + sixth, hbm=6000.0, label=1),
        samples("n1", 0, 2 + sixth, 2 + 2 * sixth, hbm=2000.0, label=2),
        samples("n1", 0, 2 + 2 * sixth, 2 + 3 * sixth, hbm=2000.0),
        samples("n1", 0, 2 + 3 * sixth, 3 - sixth, hbm=2000.0, label=2),
        samples("n1", 0, 3 - sixth, 3, hbm=7000.0, label=3),
        samples("n1", 1, 1, 3),
    )
    site.jobs(job(1, 1, 2, "n1", 1), job(2, 2, 3, "n1", 1))
    counts = site.summarize()
    found = site.found()
    assert (found[1, 1]["samples"], found[1, 1]["hbm_peak_mib"]) == (6, 6000.0)
    assert (found[2, 2]["samples"], found[2, 2]["hbm_peak_mib"]) == (4, 2000.0)
    assert (counts.samples, counts.samples_without_job) == (24, 14)


def test_a_neighbors_label_counts_wherever_it_stands(site: Site) -> None:
    """Job 2 carries its label a day after job 1 ended, and had GPU 0 all along."""
    site.telemetry(node("n1", 0, 60), samples("n1", 0, 60, 72, label=2), samples("n1", 1, 60, 72))
    site.jobs(job(1, 1, 30, "n1", 1), job(2, 26, 72, "n1", 1))
    site.bindings(prolog(1, "n1", 0, 1))
    site.summarize()
    assert site.verdicts() == {1: DOUBLY_BOUND, 2: DOUBLY_BOUND}
    # Of day 0 only job 1 is computed.
    assert site.summarize(T0_S, T0_S + 24 * 3600).verdicts == {DOUBLY_BOUND: 1}


def test_a_job_of_another_day_crowds_a_job_of_several(site: Site) -> None:
    site.telemetry(node("n1", 0, 72))
    site.jobs(job(1, 1, 60, "n1", 2), job(2, 50, 51, "n1", 1))
    assert site.summarize(T0_S, T0_S + 24 * 3600).verdicts == {UNBOUND: 1}


def test_the_size_of_a_node_is_that_of_the_jobs_days(site: Site) -> None:
    """On day 0 the exporter shows one GPU of n1, and a job had two; on day 2 the node has one."""
    site.telemetry(samples("n1", 0, 0, 72))
    site.jobs(job(1, 1, 2, "n1", 1), job(2, 4, 5, "n1", 2), job(3, 50, 51, "n1", 1))
    site.summarize()
    assert site.verdicts() == {1: UNBOUND, 2: "ok", 3: "ok"}
    site.summarize(T0_S, T0_S + 3 * 3600)
    assert site.verdicts() == {1: UNBOUND, 2: "ok", 3: "ok"}


def test_a_gpu_that_was_changed_for_another_is_the_one_of_its_time(site: Site) -> None:
    later = [{**row, "model": "NVIDIA H100 80GB HBM3"} for row in samples("n1", 0, 24, 48)]
    site.telemetry(samples("n1", 0, 0, 24), later)
    site.jobs(job(1, 1, 2, "n1", 1), job(2, 30, 31, "n1", 1))
    site.summarize()
    first, second = (site.found()[key]["gpu_model"] for key in ((1, 1), (2, 30)))
    assert first != second
    site.summarize(T0_S, T0_S + 24 * 3600)
    assert site.found()[1, 1]["gpu_model"] == first


def test_a_record_of_an_earlier_run_is_not_taken_for_a_later_ones(site: Site) -> None:
    """Job 1 ran for two minutes on GPU 0, and again two minutes later on GPU 1."""
    site.telemetry(samples("n1", 0, 0, 48, hbm=1.0), samples("n1", 1, 0, 48, hbm=2.0))
    first, again = job(1, 23 + 56 / 60, 23 + 58 / 60, "n1", 1), job(1, 24, 25, "n1", 1)
    site.jobs(first, again)
    site.bindings(prolog(1, "n1", 0, 23 + 56 / 60), prolog(1, "n1", 1, 24))
    site.summarize(T0_S + 24 * 3600, T0_S + 48 * 3600)
    assert site.gpus(1) == [("n1", 1, "")]


def test_a_job_that_loses_its_gpus_keeps_no_row_of_them(site: Site) -> None:
    site.telemetry(node("n1", 0, 24))
    site.jobs(job(1, 10, 12, "n1", 2), job(2, 14, 15, "n1", 2))
    site.summarize()
    assert len(site.gpus(1)) == 2
    assert site.jobs(job(3, 11, 13, "n1", 1)) == [0]
    site.bindings(prolog(1, "n1", 1, 10))
    site.summarize()
    assert site.gpus(1) == [("n1", 1, "")]
    site.jobs({**job(1, 10, 12, "n1", 2), "node_list": "n7"})
    site.summarize()
    assert (site.gpus(1), site.verdicts()[1]) == ([], "no telemetry")
    assert len(site.gpus(2)) == 2


def test_telemetry_of_days_that_no_job_needs_is_not_read(filled: Site) -> None:
    filled.telemetry(node("n4", 24 * 9, 24 * 9 + 1))
    filled.jobs(job(20, 24 * 9, 24 * 9 + 1, "n4", 2))
    filled.summarize()
    [damaged] = filled.store.of("c").files("telemetry", T0_S + 30 * 3600, T0_S + 31 * 3600)
    damaged.write_bytes(b"not parquet")
    assert filled.telemetry(node("n4", 24 * 9, 24 * 9 + 1, hbm=9.0), node("n1", -72, -71)) == [-3, 9]
    filled.summarize()
    assert filled.found()[20, 24 * 9]["hbm_peak_mib"] == 9.0
    filled.telemetry(node("n2", 24, 25, hbm=9.0))
    with pytest.warns(DamageWarning, match=f"{damaged} is left out"):
        assert filled.summarize().damaged_jobs
    assert filled.open_days == [1]


def test_what_is_stored_while_a_summary_runs_is_left_to_the_next(filled: Site) -> None:
    later = iter([node("n1", 1, 2, hbm=4444.0)])

    def progress(done: int, total: int, word: str) -> None:
        for rows in later:
            filled.telemetry(rows)

    filled.summarize(progress=progress)
    assert filled.open_days == [0]
    filled.summarize()
    assert filled.found()[1, 1]["hbm_peak_mib"] == 4444.0
    assert filled.open_days == []


def test_a_job_with_shards_is_measured_while_it_is_alone_on_its_gpu(site: Site) -> None:
    """Jobs 1 and 2 share GPU 0 for an hour, job 3 is alone on GPU 1, until a job comes whose GPU is unknown."""
    parts = {"gpu_share_count": 2}
    site.telemetry(samples("n1", 0, 0, 3), samples("n1", 1, 0, 3, hbm=4000.0))
    site.jobs(job(1, 0, 2, "n1", 0, **parts), job(2, 1, 3, "n1", 0, **parts), job(3, 0, 3, "n1", 0, **parts))
    site.bindings(prolog(1, "n1", 0, 0), prolog(2, "n1", 0, 1), prolog(3, "n1", 1, 0))
    site.summarize()
    assert site.verdicts() == {1: "GPU shared with another job", 2: "GPU shared with another job", 3: "ok"}
    assert site.gpus(3) == [("n1", 1, "")] and site.gpus(1) == []
    alone = site.found()[3, 0]
    assert (alone["hbm_peak_mib"], alone["coverage_frac"], alone["gpus_seen"]) == (4000.0, 1.0, 1)
    assert site.found()[1, 0]["energy_j"] is None, "neither is charged"
    site.jobs(job(4, 2, 2.5, "n1", 0, **parts))
    site.summarize()
    assert site.verdicts()[3] == "GPU shared with another job", "job 4 may have been on either GPU"
