"""The scrape interval of each GPU, and the coverage that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_sites import telemetry

from almanac.config import Config, Filters
from telemetry.attribution.allocations import JobRun
from telemetry.metrics.chunks import split_files
from telemetry.metrics.inventory import survey
from telemetry.metrics.scrapes import Intervals
from telemetry.store.store import Store

START_S = 1_741_046_400  # midnight UTC
DAY_S = 86_400
SEEDS = range(2)


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


def test_each_gpu_has_its_own_interval(tmp_path: Path) -> None:
    found = intervals(tmp_path, *(gpu(np.arange(0, 3600, step), number=step) for step in (1, 10, 60)))
    assert [of(found, 0, 3600, number=step) for step in (1, 10, 60)] == [1, 10, 60]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step_s", [10, 30, 60])
@pytest.mark.parametrize("kept", [1.0, 0.5, 0.2])
def test_neither_lost_scrapes_nor_jitter_change_the_interval(
    tmp_path: Path, seed: int, step_s: int, kept: float
) -> None:
    rng = np.random.default_rng(seed)
    times = np.arange(5, 6 * 3600, step_s)
    times = (times + rng.uniform(-1.5, 1.5, len(times)))[rng.random(len(times)) < kept]
    assert of(intervals(tmp_path, gpu(times)), 0, 6 * 3600) == pytest.approx(step_s, rel=0.03)


def test_a_hole_and_a_double_scrape_do_not_change_the_interval(tmp_path: Path) -> None:
    times = [*range(0, 600, 10), *range(2400, 3000, 10), 2405]
    assert of(intervals(tmp_path, gpu(times)), 0, 3600) == pytest.approx(10, rel=0.01)


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


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("step_s", [10, 30])
def test_a_node_that_lost_most_of_its_scrapes_has_low_coverage_alone_on_its_site_too(
    run: Any, seed: int, step_s: int
) -> None:
    rng = np.random.default_rng(100 + seed)
    times = np.arange(0, 6 * 3600, step_s)
    kept = rng.permutation(len(times)) < len(times) // 5
    frame = pd.concat([gpu(times[kept], number=number) for number in range(2)], ignore_index=True)
    found, _ = run(frame, jobs_of("n1", length_s=6 * 3600), config=Config())
    assert found[1]["coverage_frac"] == pytest.approx(0.2, rel=0.02)
    assert found[1]["verdict"] == "low coverage"


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("jitter_s", [0, 2])
def test_a_node_that_lost_19_of_20_scrapes_shows_it(run: Any, seed: int, jitter_s: int) -> None:
    rng = np.random.default_rng(200 + seed)
    times = np.arange(3, DAY_S - 5, 10.0)
    kept = rng.permutation(len(times)) < len(times) // 20
    frame = gpu((times + rng.uniform(0, max(jitter_s, 1e-3), len(times)))[kept])
    found, _ = run(frame, jobs_of("n1", length_s=DAY_S), config=Config())
    assert 2 * found[1]["coverage_frac"] == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("seed", SEEDS)
def test_second_scrapes_of_a_node_that_loses_most_do_not_shorten_its_interval(tmp_path: Path, seed: int) -> None:
    """One scrape in a hundred has a copy up to 5 s later."""
    rng = np.random.default_rng(300 + seed)
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


def test_a_job_expects_the_samples_of_each_of_its_nodes(run: Any) -> None:
    """Two GPUs every 10 s: 720. Two every 60 s: 120."""
    frames = [gpu(np.arange(0, 3600, step), host, n) for host, step in (("n1", 10), ("n2", 60)) for n in range(2)]
    found, _ = run(pd.concat(frames, ignore_index=True), [JobRun(1, START_S, START_S, START_S + 3600, 4, ("n1", "n2"))])
    assert (found[1]["expected_samples"], found[1]["coverage_frac"]) == (pytest.approx(840, rel=1e-12), 1.0)


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


@pytest.mark.parametrize(("until_s", "verdict"), [(3300, "idle"), (2400, "low coverage")])
def test_a_job_is_not_idle_if_it_may_have_worked_while_samples_were_lost(run: Any, until_s: int, verdict: str) -> None:
    frame = gpu(np.arange(0, until_s, 10)).assign(gpu_util_pct=0.0)
    found, _ = run(frame, [JobRun(1, START_S, START_S, START_S + 3600, 1, ("n1",))], config=Config())
    assert found[1]["verdict"] == verdict


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
