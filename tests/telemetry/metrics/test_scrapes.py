"""The scrape interval of each GPU, the coverage that follows from it, and jobs that lose samples in every way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_sites import side_by_side, telemetry

from almanac.config import Config, Filters
from telemetry.attribution.allocations import JobRun
from telemetry.metrics.inventory import survey
from telemetry.metrics.partials import split_files
from telemetry.metrics.scrapes import Intervals
from telemetry.store.store import Store

START_S = 1_741_046_400  # midnight UTC
DAY_S = 86_400


def gpu(
    times_s: Sequence[float] | np.ndarray[Any, Any], host: str = "n1", number: int = 0, start_s: int = START_S
) -> pd.DataFrame:
    """Samples of one GPU, times in s after start_s."""
    time_ms = (1000 * (start_s + np.asarray(times_s, float))).astype(np.int64)
    return pd.DataFrame({"host": host, "gpu": number, "mig": "", "time_ms": time_ms, "gpu_util_pct": 80.0})


def intervals(root: Path, *frames: pd.DataFrame) -> Intervals:
    store = Store.create(root)
    store.of("c").write("telemetry", telemetry(pd.concat(frames, ignore_index=True)))
    with store.connect() as db:
        return survey(db, split_files(store.of("c").files("telemetry")), (-(2**60), 2**60)).intervals


def of(found: Intervals, from_s: float, until_s: float, host: str = "n1", number: int = 0) -> float | None:
    return found.of((host, number, ""), START_S + round(from_s), START_S + round(until_s))


@pytest.mark.parametrize("step_s", [10, 30, 60])
@pytest.mark.parametrize("kept", [1.0, 0.5, 0.2])
def test_neither_lost_scrapes_nor_jitter_change_the_interval(tmp_path: Path, step_s: int, kept: float) -> None:
    rng = np.random.default_rng(step_s)
    times = np.arange(5, 6 * 3600, step_s)
    times = (times + rng.uniform(-1.5, 1.5, len(times)))[rng.random(len(times)) < kept]
    assert of(intervals(tmp_path, gpu(times)), 0, 6 * 3600) == pytest.approx(step_s, rel=0.03)


def test_an_hour_steadily_scraped_at_another_interval_has_its_own(tmp_path: Path) -> None:
    """Every 10 s for four hours, then every 30 s for two: 720 + 120 scrapes in the two hours around the change."""
    times = [*range(0, 4 * 3600, 10), *range(4 * 3600, 6 * 3600, 30)]
    found = intervals(tmp_path, gpu(times))
    assert of(found, 0, 3600) == 10
    assert of(found, 5 * 3600, 6 * 3600) == 30
    assert of(found, 3 * 3600, 5 * 3600) == pytest.approx(7200 / (360 + 120), rel=1e-12)


def test_a_gpu_without_an_interval_takes_its_own_other_days_then_its_hosts_then_any(tmp_path: Path) -> None:
    found = intervals(
        tmp_path,
        gpu(np.arange(0, 3600, 20), number=0, start_s=START_S),
        gpu([100], number=0, start_s=START_S + DAY_S),
        gpu(np.arange(0, 3600, 30), number=1, start_s=START_S + DAY_S),
        gpu(np.arange(0, 3600, 60), "n2", number=0, start_s=START_S + DAY_S),
        gpu(np.arange(0, 3600, 60), "n2", number=1, start_s=START_S + DAY_S),
    )
    assert of(found, DAY_S - 3600, DAY_S + 3600) == 20
    assert of(found, DAY_S, DAY_S + 3600) == 30
    assert of(found, DAY_S, DAY_S + 3600, "n3") == 60
    assert of(found, 2 * DAY_S, 2 * DAY_S + 3600) is None


def test_one_sample_an_hour_tells_no_interval(tmp_path: Path) -> None:
    assert of(intervals(tmp_path, gpu([0, 3600, 7200])), 0, 7200) is None


def jobs_of(*hosts: str, length_s: int = 3600) -> list[JobRun]:
    return [JobRun(n + 1, START_S, START_S, START_S + length_s, 2, (host,)) for n, host in enumerate(hosts)]


def test_complete_nodes_of_mixed_intervals_are_all_ok(run: Any) -> None:
    """Sixteen nodes, scraped every 10, 30 and 60 s at phases of their own."""
    steps = [10, 30, 60, 10, 60, 30, 60, 60, 10, 30, 10, 10, 60, 10, 10, 10]
    rng = np.random.default_rng(1)
    phases = rng.uniform(0, 1, 16)
    frames = [
        gpu(np.arange(phases[n] * step, 3600, step), f"n{n:02}", number)
        for n, step in enumerate(steps)
        for number in range(2)
    ]
    jobs = jobs_of(*(f"n{n:02}" for n in range(16)))
    found, rows = run(pd.concat(frames, ignore_index=True), jobs, config=Config())
    assert [row["verdict"] for row in found.values()] == ["ok"] * 16
    assert [row["coverage_frac"] for row in found.values()] == pytest.approx([1.0] * 16, rel=1e-3)
    assert [row["expected_samples"] for row in rows[::2]] == pytest.approx([3600 / step for step in steps], rel=1e-3)


@pytest.mark.parametrize("step_s", [10, 30])
def test_a_node_that_lost_most_of_its_scrapes_has_low_coverage_alone_on_its_site_too(run: Any, step_s: int) -> None:
    rng = np.random.default_rng(100)
    times = np.arange(0, 6 * 3600, step_s)
    kept = rng.permutation(len(times)) < len(times) // 5
    frame = pd.concat([gpu(times[kept], number=number) for number in range(2)], ignore_index=True)
    found, _ = run(frame, jobs_of("n1", length_s=6 * 3600), config=Config())
    assert found[1]["coverage_frac"] == pytest.approx(0.2, rel=0.02)
    assert found[1]["verdict"] == "low coverage"


def test_second_scrapes_of_a_node_that_loses_most_do_not_shorten_its_interval(tmp_path: Path) -> None:
    """One scrape in a hundred has a copy up to 5 s later."""
    rng = np.random.default_rng(300)
    times = np.arange(0, DAY_S - 20, 10.0)[rng.random(DAY_S // 10 - 2) < 0.2]
    copies = rng.choice(times, len(times) // 100)
    times = np.unique(np.concatenate([times, copies + rng.uniform(0.3, 5, len(copies)).round(3)]))
    assert of(intervals(tmp_path, gpu(times)), 0, DAY_S) == pytest.approx(10, rel=0.02)


def test_every_fifth_scrape_of_one_node_is_a_loss_where_the_others_have_all(run: Any) -> None:
    """Nodes at 30 and 60 s are complete: sites configure such intervals."""
    steps = [10, 10, 10, 10, 50, 30, 60]
    frames = [gpu(np.arange(n, 3600, step), f"n{n}") for n, step in enumerate(steps)]
    jobs = [JobRun(n, START_S, START_S, START_S + 3600, 1, (f"n{n}",)) for n in range(7)]
    found, _ = run(pd.concat(frames, ignore_index=True), jobs, config=Config())
    assert [row["coverage_frac"] for row in found.values()] == pytest.approx([1, 1, 1, 1, 0.2, 1, 1], rel=1e-3)
    assert found[4]["verdict"] == "low coverage"


def test_a_site_that_scrapes_every_50_s_is_complete(run: Any) -> None:
    frames = [gpu(np.arange(7 * n, 3600, 50), f"n{n}") for n in range(3)]
    found, _ = run(pd.concat(frames, ignore_index=True), jobs_of("n0", "n1", "n2"))
    assert [2 * row["coverage_frac"] for row in found.values()] == pytest.approx([1, 1, 1], rel=1e-3)


def test_two_hours_of_every_fifth_scrape_are_a_loss(tmp_path: Path) -> None:
    times = [*range(0, 4 * 3600, 10), *range(4 * 3600, 6 * 3600, 50), *range(6 * 3600, 10 * 3600, 10)]
    found = intervals(tmp_path, gpu(times))
    assert [of(found, 3600 * hour, 3600 * (hour + 2)) for hour in (0, 4, 8)] == [10, 10, 10]


def test_rows_that_exist_only_while_jobs_run_are_complete(run: Any) -> None:
    """Four jobs of 4 minutes with pauses between them, a sample every 30 s."""
    starts = [0, 700, 1500, 3100]
    frame = pd.concat([gpu(start + np.arange(3, 240, 30)) for start in starts], ignore_index=True)
    jobs = [JobRun(n, START_S + at, START_S + at, START_S + at + 240, 1, ("n1",)) for n, at in enumerate(starts)]
    found, _ = run(frame, jobs, config=Config())
    assert [(row["expected_samples"], row["coverage_frac"]) for row in found.values()] == [(8, 1)] * 4


def test_a_gpu_with_many_samples_does_not_hide_one_with_few(run: Any) -> None:
    """Every second for an hour, and every minute for 5 of 60 minutes. A third and a fourth GPU have no sample."""
    frames = [gpu(np.arange(0, 3600, 1)), gpu(np.arange(0, 300, 60), "n2")]
    hosts = (("n1", "n2"), ("n1", "n2", "n3", "n4"))
    for nodes in hosts:
        job = JobRun(1, START_S, START_S, START_S + 3600, len(nodes), nodes)
        row = run(pd.concat(frames, ignore_index=True), [job], config=Config())[0][1]
        assert row["coverage_frac"] == pytest.approx((1 + 5 / 60) / len(nodes), rel=1e-12)
        assert row["coverage_gpu_util_pct"] == row["coverage_frac"]
        assert row["verdict"] == ("ok" if len(nodes) == 2 else "low coverage")


def test_a_job_is_not_idle_if_one_of_its_gpus_was_not_seen(run: Any) -> None:
    """Of two GPUs, one is idle and the other is silent, or idle too."""
    frames = [gpu(np.arange(0, 3600, 10), host).assign(gpu_util_pct=0.0) for host in ("n1", "n3", "n4")]
    hosts = (("n1", "n2"), ("n3", "n4"))
    jobs = [JobRun(n, START_S, START_S, START_S + 3600, 2, pair) for n, pair in enumerate(hosts)]
    found, _ = run(pd.concat(frames, ignore_index=True), jobs, config=Config())
    assert [row["verdict"] for row in found.values()] == ["low coverage", "idle"]
    assert found[0]["coverage_frac"] == 0.5


def test_a_job_is_not_idle_if_it_may_have_worked_while_samples_were_lost(run: Any) -> None:
    job = JobRun(1, START_S, START_S, START_S + 3600, 1, ("n1",))
    cases = [(gpu(np.arange(0, until_s, 10)).assign(gpu_util_pct=0.0), job) for until_s in (3300, 2400)]
    assert [row["verdict"] for row, _ in side_by_side(run, cases, config=Config())] == ["idle", "low coverage"]


def test_any_share_is_possible_as_min_coverage(run: Any) -> None:
    """The square of 0.4 has 17 digits as a float."""
    frames = pd.concat([gpu(np.arange(0, 1800, 10), number=number) for number in range(2)], ignore_index=True)
    found, _ = run(frames, jobs_of("n1"), config=Config(filters=Filters(min_coverage=0.4)))
    assert found[1]["verdict"] == "ok"


def test_a_gpu_with_low_coverage_does_not_speak_for_its_job(run: Any) -> None:
    """Three GPUs at 80%. The exporter of a fourth one dies after 10 minutes, in which it was idle but for 10 s."""
    frames = [gpu(np.arange(0, 3600, 10), number=number) for number in range(3)]
    startup = gpu(np.arange(0, 600, 10), number=3)
    startup["gpu_util_pct"] = np.where(np.arange(60) == 30, 80.0, 0.0)
    job = JobRun(1, START_S, START_S, START_S + 3600, 4, ("n1",))
    row = run(pd.concat([*frames, startup], ignore_index=True), [job], config=Config())[0][1]
    assert (row["mean_gpu_util_pct"], row["temporal_imbalance"]) == (pytest.approx(80, rel=1e-12), 0)
    assert (row["verdict"], row["idle_gpus"]) == ("ok", [])


HOLES_START_S = 1_741_046_400 - 5400  # ninety minutes before midnight UTC
JOBS = 60
FAULTS = ("zero", "spike", "frozen", "caught up", "reset", "dip", "lost")


@dataclass(frozen=True)
class Truth:
    """The true figures of the job. coverage: the mean over its GPUs."""

    job: JobRun
    util_pct: float
    energy_j: float
    coverage: float
    frames: list[pd.DataFrame]


def draw_job(rng: np.random.Generator, number: int) -> Truth:
    """A job that works evenly, idles, or begins to work late. Each of its nodes loses samples in its own way."""
    length_s, nodes, gpus = int(rng.integers(900, 6000)), int(rng.integers(1, 5)), int(rng.choice([1, 2, 4]))
    start_s = HOLES_START_S + int(rng.integers(0, 4000))
    idle_frac = rng.choice([0.0, 0.55, 1.0], p=[0.6, 0.25, 0.15])
    is_idle = np.arange(length_s) < idle_frac * length_s
    util_pct, power_w = np.where(is_idle, 0.0, 90.0), np.where(is_idle, 60.0, 320.0)
    used_mj = 1000 * np.concatenate([[0.0], np.cumsum(power_w)])
    frames, coverage = [], []
    for node in range(nodes):
        step_s, loss = int(rng.choice([10, 30, 60])), rng.choice([0.0, 0.1, 0.4])
        hole_s = np.sort(rng.uniform(0, length_s, 2)) * rng.choice([0, 1], p=[0.7, 0.3])
        for gpu in range(gpus):
            times = np.arange(rng.uniform(0, step_s), length_s, step_s)
            times = np.minimum(times + rng.uniform(0, 0.1 * step_s, len(times)), length_s - 0.001)
            kept = (rng.random(len(times)) >= loss) & ((times < hole_s[0]) | (times >= hole_s[1]))
            times = times[kept]
            coverage.append(min(1.0, len(times) * step_s / length_s))
            counter = rng.uniform(1e10, 1e12) + np.interp(times, np.arange(length_s + 1), used_mj)
            columns = {"host": f"j{number}n{node}", "gpu": gpu, "mig": "", "uuid": f"GPU-{number}-{node}-{gpu}"}
            frame = pd.DataFrame({"time_ms": (1000 * (start_s + times)).astype(np.int64)}).assign(**columns)
            at = times.astype(int)
            frames.append(frame.assign(energy_mj=faulty(rng, counter), gpu_util_pct=util_pct[at], power_w=power_w[at]))
    job = JobRun(
        number, start_s, start_s, start_s + length_s, nodes * gpus, tuple(f"j{number}n{n}" for n in range(nodes))
    )
    energy_j = nodes * gpus * used_mj[-1] / 1000
    return Truth(job, float(util_pct.mean()), energy_j, float(np.mean(coverage)), frames)


def faulty(rng: np.random.Generator, counter: np.ndarray) -> np.ndarray:
    """The counter with one fault, or without any."""
    if len(counter) < 8 or rng.random() < 0.4:
        return counter
    found, first = counter.copy(), int(rng.integers(1, len(counter) - 2))
    last = int(rng.integers(first + 1, len(counter)))
    kind = rng.choice(FAULTS)
    if kind in ("zero", "spike"):
        found[first] = 0.0 if kind == "zero" else 9e15
    elif kind in ("frozen", "caught up"):
        found[first:last] = found[first]
        found[last:] -= found[last] - found[first] if kind == "frozen" else 0.0
    elif kind == "reset":
        found[first:] -= found[first] - 1000
    elif kind == "dip":
        found[first : first + 3] -= 0.9 * found[first]
    else:
        found[first:last] = np.nan
    return found


@pytest.mark.parametrize("seed", [11, 12])
def test_lost_samples_blame_nobody(run: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = [draw_job(rng, number) for number in range(JOBS)]
    frame = pd.concat([part for truth in drawn for part in truth.frames], ignore_index=True)
    rows, _ = run(frame.sample(frac=1.0, random_state=seed), [truth.job for truth in drawn], config=Config())
    errors = []
    for number, truth in enumerate(drawn):
        row = rows[number]
        assert row["coverage_frac"] == pytest.approx(truth.coverage, abs=0.08), truth.job
        assert row["spatial_imbalance"] is None or row["spatial_imbalance"] < 0.3, truth.job
        if truth.util_pct:
            assert row["verdict"] != "idle", truth.job
        if truth.util_pct == 90 and row["verdict"] == "ok":
            assert row["mean_gpu_util_pct"] == pytest.approx(90, rel=1e-9), truth.job
            assert (row["temporal_imbalance"], row["idle_gpus"]) == (pytest.approx(0, abs=1e-9), []), truth.job
        if row["energy_j"] is not None:
            errors.append(abs(row["energy_j"] / truth.energy_j - 1))
            assert row["energy_power_w"] < 500
            assert 0 < row["energy_measured_frac"] <= 1
    assert len(errors) > JOBS / 2
    assert np.quantile(errors, 0.5) < 0.02
    assert np.quantile(errors, 0.9) < 0.1
    assert {row["verdict"] for row in rows.values()} <= {"ok", "idle", "low coverage", "no telemetry"}
