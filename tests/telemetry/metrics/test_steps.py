"""Metrics of each step of a job, and steps that have none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.config import Config, Filters
from telemetry.attribution.allocations import UNBOUND, Attribution, JobRun, attribute, parse_hosts
from telemetry.attribution.seen_units import Inventory
from telemetry.counters import STEP_METRICS
from telemetry.metrics.steps import (
    CONCURRENT,
    NO_GPUS,
    SOME_GPUS,
    UNKNOWN_COUNT,
    MeasuredStep,
    StepCounts,
    attribute_steps,
    concurrent_steps,
)  # fmt: skip
from telemetry.metrics.summary import SummaryCounts, summarize
from telemetry.store.schema import BINDINGS, JOBS, STEPS, TELEMETRY
from telemetry.store.store import Store

START_S = 1_741_046_400  # midnight UTC
OPEN = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))


def step(name: str, start_s: int, end_s: int, gpus: int | None = 4, on: str = "n1", job: int = 0) -> MeasuredStep:
    return MeasuredStep(job, name, start_s, end_s, gpus, parse_hosts(on))


def owned(*jobs: JobRun, gpus: int = 4) -> Attribution:
    units = frozenset((gpu, "") for gpu in range(gpus))
    return attribute(jobs, Inventory({(host, 0): units for job in jobs for host in job.hosts}), {}, [])


def job(gpus: int = 4, on: str = "n1", job_id: int = 1, start_s: int = 0, end_s: int = 1000) -> JobRun:
    return JobRun(job_id, start_s, start_s, end_s, gpus, parse_hosts(on))


def claimed(found: Attribution) -> dict[int, set[tuple[str, int, int, int]]]:
    result: dict[int, set[tuple[str, int, int, int]]] = {}
    for row in found.allocations.to_pylist():
        span = (row["start_ms"] // 1000, row["end_ms"] // 1000)
        result.setdefault(row["job"], set()).add((row["host"], row["gpu"], *span))
    return result


def test_a_step_owns_its_jobs_gpus_on_its_hosts_in_its_time() -> None:
    whole = job(8, "n[1-2]")
    found = attribute_steps([step("0", 10, 20, 8, "n[1-2]"), step("1", 20, 30, 4, "n2")], [whole], owned(whole))
    assert claimed(found) == {
        0: {(host, gpu, 10, 20) for host in ("n1", "n2") for gpu in range(4)},
        1: {("n2", gpu, 20, 30) for gpu in range(4)},
    }
    assert found.origin == {0: "whole node", 1: "whole node"} and found.failed == {}


def test_steps_at_the_same_time_on_different_hosts_are_told_apart() -> None:
    whole = job(8, "n[1-2]")
    found = attribute_steps([step("0", 10, 20, 4, "n1"), step("1", 15, 30, 4, "n2")], [whole], owned(whole))
    assert {number: {unit[0] for unit in units} for number, units in claimed(found).items()} == {0: {"n1"}, 1: {"n2"}}


@pytest.mark.parametrize("gpus", [2, 4])
def test_steps_at_the_same_time_on_one_host_are_excluded(gpus: int) -> None:
    """Each has half of the GPUs, or both have all of them (srun --overlap)."""
    steps = [step("0", 0, 10), step("1", 10, 20, gpus), step("2", 19, 30, gpus), step("3", 30, 40)]
    found = attribute_steps(steps, [job()], owned(job()))
    assert set(claimed(found)) == {0, 3}
    assert found.failed == {1: CONCURRENT, 2: CONCURRENT}


@pytest.mark.parametrize(
    ("steps", "owners", "failed"),
    [
        ([step("0", 0, 50), step("1", 10, 20, 0)], {0}, {1: NO_GPUS}),  # disturbs nobody
        # unknown GPUs may be any of them
        ([step("0", 0, 50), step("1", 10, 20, None), step("2", 60, 70)], {2}, {0: CONCURRENT, 1: UNKNOWN_COUNT}),
        # fewer GPUs than its job has there: the others idle, or the batch script uses them
        ([step("0", 0, 50, 1), step("1", 60, 70)], {1}, {0: SOME_GPUS}),
    ],
)
def test_a_step_whose_own_gpus_cannot_be_named_is_excluded(
    steps: list[MeasuredStep], owners: set[int], failed: dict[int, str]
) -> None:
    found = attribute_steps(steps, [job()], owned(job()))
    assert (set(claimed(found)), found.failed) == (owners, failed)


def test_gpus_on_hosts_without_telemetry_are_counted_as_the_jobs() -> None:
    """Four of the job's eight GPUs show; a step of four GPUs on both hosts may have two on each."""
    dark = job(8, "n[1-2]")
    seen = attribute([dark], Inventory({("n1", 0): frozenset((gpu, "") for gpu in range(4))}), {}, [])
    steps = [step("0", 0, 10, 4, "n[1-2]"), step("1", 20, 30, 8, "n[1-2]"), step("2", 40, 50, 4, "n1")]
    found = attribute_steps(steps, [dark], seen)
    assert set(claimed(found)) == {1, 2} and found.failed == {0: SOME_GPUS}


def test_steps_of_a_job_whose_gpus_are_unknown_say_why() -> None:
    shared = job(2)
    found = attribute_steps([step("0", 0, 10, 2), step("1", 20, 30, 2)], [shared], owned(shared))
    assert found.failed == {0: UNBOUND, 1: UNBOUND} and found.allocations.num_rows == 0


def test_steps_of_different_jobs_do_not_disturb_each_other() -> None:
    """Two jobs share a node by bindings: their steps run at once, each on its own job's GPUs."""
    assert concurrent_steps([step("0", 0, 10, 2, job=0), step("0", 0, 10, 2, job=1)]) == set()


spans = st.tuples(st.integers(0, 60), st.integers(1, 20), st.sampled_from([0, 2, 4, 8, None]))


@given(st.lists(st.tuples(spans, st.sampled_from(["n1", "n2", "n[1-2]"])), max_size=12))
def test_no_gpu_is_claimed_by_two_steps_at_once(drawn: Sequence[tuple[tuple[int, int, int | None], str]]) -> None:
    whole = job(8, "n[1-2]")
    steps = [step(str(n), start, start + length, gpus, on) for n, ((start, length, gpus), on) in enumerate(drawn)]
    found = attribute_steps(steps, [whole], owned(whole))
    rows = found.allocations.to_pylist()
    for one in rows:
        assert one["host"] in steps[one["job"]].hosts
        for other in rows:
            if one["job"] < other["job"] and (one["host"], one["gpu"]) == (other["host"], other["gpu"]):
                assert one["end_ms"] <= other["start_ms"] or other["end_ms"] <= one["start_ms"]
    assert set(found.origin) | set(found.failed) == set(range(len(steps)))


class Site:
    """A store with jobs, steps and a sample of every GPU each 10 s; times are seconds after START_S."""

    def __init__(self, folder: Path) -> None:
        self.store = Store.create(folder)

    def job(self, job_id: int, start: int, end: int, gpus: int, nodes: str, **more: Any) -> None:
        row = {"job_id": job_id, "submit_s": START_S, "start_s": START_S + start, "end_s": START_S + end}
        self._write("jobs", JOBS, [{**row, "gpu_count": gpus, "node_list": nodes, "state": "COMPLETED", **more}])

    def step(self, job_id: int, name: str, start: int, end: int, gpus: int, nodes: str = "n1") -> None:
        row = {"job_id": job_id, "submit_s": START_S, "step": name, "gpu_count": gpus, "node_list": nodes}
        self._write("steps", STEPS, [{**row, "start_s": START_S + start, "end_s": START_S + end}])

    def samples(self, host: str, gpu: int, util: Sequence[float], from_s: int = 0, **more: Any) -> None:
        rows = [
            {"host": host, "gpu": gpu, "mig": "", "time_ms": (START_S + from_s + 10 * n) * 1000, "gpu_util_pct": value,
             "hbm_used_mib": 100.0 * (n + 1), "energy_mj": 100_000.0 * n, "model": "NVIDIA A100-SXM4-40GB", **more}
            for n, value in enumerate(util)
        ]  # fmt: skip
        self._write("telemetry", TELEMETRY, rows)

    def bindings(self, rows: Iterable[dict[str, Any]]) -> None:
        self._write(
            "bindings", BINDINGS, [{"host": "n1", "origin": "prolog", "seen_s": START_S, **row} for row in rows]
        )

    def _write(self, table: str, schema: pa.Schema, rows: list[dict[str, Any]]) -> None:
        self.store.of("c").write(table, pa.Table.from_pylist(rows, schema=schema))

    def summarize(self, config: Config = OPEN) -> SummaryCounts:
        return summarize(self.store.of("c"), config, START_S - 86_400, START_S + 86_400)

    def steps(self) -> dict[tuple[int, str], dict[str, Any]]:
        return {(row["job_id"], row["step"]): row for row in self.store.of("c").read("step_metrics").to_pylist()}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "store")


def two_steps(site: Site) -> None:
    """GPU 0: 10 in the first minute, 90 in the second, then idle; GPU 1: 30, 50, idle. Steps of a minute each."""
    site.job(1, 0, 180, 2, "n1")
    site.samples("n1", 0, [10.0] * 6 + [90.0] * 6 + [0.0] * 6)
    site.samples("n1", 1, [30.0] * 6 + [50.0] * 6 + [0.0] * 6)
    site.step(1, "0", 0, 60, 2)
    site.step(1, "1", 60, 120, 2)


def test_metrics_of_each_step(site: Site) -> None:
    """Means 20 and 70, where the job's is 30. Imbalance 1 - 40 / 60 and 1 - 140 / 180. 600 J of two GPUs each."""
    two_steps(site)
    counts = site.summarize()
    first, second = site.steps()[1, "0"], site.steps()[1, "1"]
    assert [row["mean_gpu_util_pct"] for row in (first, second)] == [20.0, 70.0]
    assert [row["hbm_peak_mib"] for row in (first, second)] == [600.0, 1200.0]
    assert [row["hbm_peak_ms"] for row in (first, second)] == [(START_S + 50) * 1000, (START_S + 110) * 1000]
    assert [row["spatial_imbalance"] for row in (first, second)] == pytest.approx([1 / 3, 2 / 9], rel=1e-12)
    assert [row["energy_j"] for row in (first, second)] == pytest.approx([1200.0, 1200.0], rel=1e-12)
    assert [row["coverage_frac"] for row in (first, second)] == [1.0, 1.0]
    for row in (first, second):
        assert (row["verdict"], row["attributed_by"], row["gpus_seen"]) == ("ok", "whole node", 2)
    assert site.store.of("c").read("job_metrics")["mean_gpu_util_pct"].to_pylist() == [30.0]
    assert counts.steps.as_dict() == {
        "jobs": 1, "steps": 2, "verdicts": {"ok": 2}, "samples": 36, "samples_without_step": 12,
    }  # fmt: skip
    assert counts.as_dict()["steps"] == counts.steps.as_dict()
    said = {"steps: 2 in 1 jobs: 2 ok", "  samples: 36 of these jobs, 12 of no step that was measured"}
    assert said <= set(counts.lines())


def test_a_step_as_long_as_its_job_has_the_metrics_of_the_job(site: Site) -> None:
    """The job has a step without GPUs, too, so that it has two."""
    two_steps(site)
    site.job(2, 0, 180, 2, "n2")
    for gpu, util in enumerate(([40.0] * 9 + [80.0] * 9, [100.0] * 18)):
        site.samples("n2", gpu, util, dram_active_frac=0.2, fp64_active_frac=0.4)
    site.step(2, "0", 0, 180, 2, "n2")
    site.step(2, "1", 20, 30, 0, "n2")
    site.summarize()
    [whole] = [row for row in site.store.of("c").read("job_metrics").to_pylist() if row["job_id"] == 2]
    found = site.steps()[2, "0"]
    assert found["class_fp64"] == "compute"
    for name in set(STEP_METRICS.names) - {"step"}:
        assert found[name] == whole[name], name


def test_steps_that_cannot_be_measured_keep_their_row_and_its_reason(site: Site) -> None:
    two_steps(site)
    site.step(1, "2", 120, 150, 1)
    site.step(1, "3", 150, 170, 2)
    site.step(1, "4", 160, 180, 2)
    counts = site.summarize()
    assert {name: site.steps()[1, name]["verdict"] for name in "01234"} == {
        "0": "ok", "1": "ok", "2": SOME_GPUS, "3": CONCURRENT, "4": CONCURRENT,
    }  # fmt: skip
    assert site.steps()[1, "3"]["samples"] == 0 and site.steps()[1, "3"]["mean_gpu_util_pct"] is None
    assert counts.steps.as_dict()["samples_without_step"] == 12


def test_short_steps_are_excluded_without_looking_at_their_samples(site: Site) -> None:
    two_steps(site)
    site.step(1, "2", 120, 125, 2)
    strict = Config(filters=Filters(min_elapsed_s=30, min_gpu_util_pct=-1.0))
    site.summarize(strict)
    assert {name: row["verdict"] for (_, name), row in site.steps().items()} == {"0": "ok", "1": "ok", "2": "short"}
    assert site.steps()[1, "2"]["samples"] == 0


def test_a_single_step_is_not_looked_at(site: Site) -> None:
    """A step that never ran, and one outside of its job's time, count for nothing."""
    two_steps(site)
    site.job(2, 0, 180, 2, "n2")
    site.step(2, "0", 0, 60, 2, "n2")
    site.step(2, "1", 60, 60, 2, "n2")
    site.step(2, "2", 500, 600, 2, "n2")
    assert site.summarize().steps.as_dict()["jobs"] == 1
    assert set(site.steps()) == {(1, "0"), (1, "1")}


def test_a_job_that_is_looked_at_twice_counts_once(site: Site) -> None:
    two_steps(site)
    first, again = site.summarize().steps, site.summarize().steps
    first.add(again)
    assert first == again and first.as_dict()["steps"] == 2


def test_without_steps_nothing_is_stored_or_said(site: Site) -> None:
    site.job(1, 0, 180, 2, "n1")
    site.samples("n1", 0, [50.0] * 18)
    counts = site.summarize()
    assert counts.steps == StepCounts() and not any("steps" in line for line in counts.lines())
    assert site.store.of("c").files("step_metrics") == []


def test_a_step_is_cut_to_the_run_of_its_job(site: Site) -> None:
    """A step that accounting ends late (its completion was lost) does not take samples of the next job."""
    site.job(1, 0, 60, 1, "n1")
    site.job(2, 60, 120, 1, "n1")
    site.samples("n1", 0, [10.0] * 6 + [90.0] * 6)
    site.step(1, "0", 0, 30, 1)
    site.step(1, "1", 30, 120, 1)
    site.summarize()
    assert site.steps()[1, "1"]["samples"] == 3 and site.steps()[1, "1"]["mean_gpu_util_pct"] == 10.0


def test_steps_of_jobs_that_share_a_node_have_their_own_jobs_gpus(site: Site) -> None:
    for number in (1, 2):
        site.job(number, 0, 120, 1, "n1")
        site.samples("n1", number, [10.0 * number] * 6 + [20.0 * number] * 6)
        site.step(number, "0", 0, 60, 1)
        site.step(number, "1", 60, 120, 1)
    site.bindings({"job_id": n, "gpu": n} for n in (1, 2))
    site.summarize()
    assert {key: row["mean_gpu_util_pct"] for key, row in site.steps().items()} == {
        (1, "0"): 10.0, (1, "1"): 20.0, (2, "0"): 20.0, (2, "1"): 40.0,
    }  # fmt: skip


@pytest.mark.parametrize("has_steps", [False, True])
def test_the_samples_of_a_packed_gpu_count_once(site: Site, has_steps: bool) -> None:
    """Two tasks at a time on one GPU of a job, as almanac-pack runs them, or each as a step (srun --overlap)."""
    site.job(1, 0, 120, 1, "n1")
    site.samples("n1", 0, [50.0] * 6 + [90.0] * 6)
    if has_steps:
        site.step(1, "0", 0, 120, 1)
        site.step(1, "1", 0, 90, 1)
        site.step(1, "2", 90, 120, 1)
    site.summarize()
    (row,) = site.store.of("c").read("job_metrics").to_pylist()
    assert (row["samples"], row["gpus_seen"], row["mean_gpu_util_pct"]) == (12, 1, 70.0)
    assert row["energy_j"] == pytest.approx(1150.0, abs=50.0)  # 100 J every 10 s
    assert {step["samples"] for step in site.steps().values()} <= {0}


def test_a_step_over_midnight_has_the_samples_of_both_days(site: Site) -> None:
    site.job(1, -30, 90, 2, "n1", submit_s=START_S)
    for gpu, high in enumerate((100.0, 50.0)):
        site.samples("n1", gpu, [high] * 6 + [100.0] * 6, from_s=-30)
    site.step(1, "0", -30, 30, 2)
    site.step(1, "1", 30, 90, 2)
    site.summarize()
    found = site.steps()
    assert (found[1, "0"]["spatial_imbalance"], found[1, "0"]["spatial_windows"]) == (0.25, 2)
    assert (found[1, "1"]["spatial_imbalance"], found[1, "1"]["spatial_windows"]) == (0.0, 2)


def test_mig_instances_of_one_gpu_go_to_the_jobs_whose_records_name_them(site: Site) -> None:
    """From the store's records to the metrics: the exporter gives the GPU's UUID and the instance's id."""
    for number, mig in ((1, "7"), (2, "13")):
        site.job(number, 0, 60, 1, "n1")
        site.samples("n1", 0, [0.0] * 6, mig=mig, uuid="GPU-a", sm_active_frac=0.25 * number)
    site.bindings({"job_id": n, "gpu": n + 3, "uuid": "GPU-a", "mig": mig} for n, mig in ((1, "7"), (2, "13")))
    site.summarize()
    rows = {row["job_id"]: row for row in site.store.of("c").read("job_metrics").to_pylist()}
    assert [(rows[n]["attributed_by"], rows[n]["samples"]) for n in (1, 2)] == [("prolog", 6), ("prolog", 6)]
    assert [rows[n]["mean_sm_active_frac"] for n in (1, 2)] == [0.25, 0.5]
