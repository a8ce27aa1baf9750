"""Sums of the site report, by a few jobs whose figures can be worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from almanac.config import AdviceSection, Config, Tier
from almanac.errors import DamageWarning
from reports.site.totals import Share, SiteTotals, Standing, load_totals, site_runs
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

CLUSTER, T0, HOUR_S = "c", 1_780_000_000, 3600
TIERS = tuple(Tier(name=f"hbm{size}g", capacity_mib=size * 1024, constraint=f"hbm{size}g") for size in (40, 80))
SITE = Config(tiers=TIERS, advice=AdviceSection(headroom_mib=1024))
KWH = 3.6e6


def job(job_id: int, gpus: int, hours: float, **more: Any) -> dict[str, Any]:
    elapsed_s = round(hours * HOUR_S)
    return {
        "job_id": job_id, "submit_s": T0, "start_s": T0, "end_s": T0 + elapsed_s, "elapsed_s": elapsed_s,
        "gpu_count": gpus, "user": "alice", "account": "a", "partition": "gpu", "state": "COMPLETED", **more,
    }  # fmt: skip


def metrics(job_id: int, **more: Any) -> dict[str, Any]:
    return {"job_id": job_id, "submit_s": T0, "verdict": "ok", "coverage_frac": 1.0, "idle_gpus": [], **more}


def totals_of(
    root: Path, jobs: list[Any], job_metrics: list[Any], gpu_metrics: list[Any] | None = None, config: Config = SITE
) -> SiteTotals:
    store = Store.create(root / "store")
    for table, rows in (("jobs", jobs), ("job_metrics", job_metrics), ("gpu_metrics", gpu_metrics or [])):
        store.of(CLUSTER).write(table, pa.Table.from_pylist(rows, schema=TABLES[table].schema))
    return load(store, config)


def load(store: Store, config: Config = SITE) -> SiteTotals:
    with site_runs(store.of(CLUSTER), T0 - 1, T0 + 1) as db:
        return load_totals(db, config)


def gpu(job_id: int, number: int, is_idle: bool, energy_j: float | None) -> dict[str, Any]:
    place = {"job_id": job_id, "submit_s": T0, "host": "n1", "gpu": number, "mig": ""}
    return {**place, "is_idle": is_idle, "energy_j": energy_j}


JOBS = [
    job(1, 4, 2),  # half measured, one of four GPUs never used
    job(2, 1, 3, user="bob", account="bob"),  # did nothing
    job(3, 2, 5, user="carol"),  # no telemetry
    job(4, 1, 1, state="REQUEUED"),  # part of a job, whatever its metrics
    job(5, 1, 1, user="dave", account="b"),  # not summarised
    job(6, 1, 4, user="erin", account="b", partition="mig"),  # MIG: no GPU_UTIL, and no energy
    job(7, 1, 1, end_s=None, state="RUNNING"),
    job(8, 1, 1, start_s=None, state="CANCELLED"),
    job(9, 0, 1),
    job(10, 4, 9, submit_s=T0 + 1),  # beyond the span
]
METRICS = [
    metrics(1, coverage_frac=0.5, mean_gpu_util_pct=50.0, temporal_imbalance=0.1, gpus_seen=4, idle_gpus=["n1:3"],
            energy_j=2 * KWH, gpu_model="A100-80", mfu_frac=0.3),
    metrics(2, verdict="idle", mean_gpu_util_pct=0.5, temporal_imbalance=0.0, gpus_seen=1, energy_j=KWH),
    metrics(3, verdict="no telemetry", coverage_frac=0.0),
    metrics(4, mean_gpu_util_pct=0.0, temporal_imbalance=0.0, gpus_seen=1),
    metrics(6, mean_gr_engine_active_frac=0.25, gpus_seen=1, gpu_model="A100-40", mfu_frac=0.1),
]  # fmt: skip
GPUS = [gpu(1, number, number == 3, KWH / 10 if number == 3 else 1.9 * KWH / 3) for number in range(4)]


@pytest.fixture
def totals(tmp_path: Path) -> SiteTotals:
    return totals_of(tmp_path, JOBS, METRICS, GPUS)


def test_hours_waste_and_energy_of_all_jobs(totals: SiteTotals) -> None:
    assert totals.total == Share(
        jobs=6, measured_jobs=3, hours=27.0, measured_hours=4.0 + 3.0 + 4.0,
        util_frac=pytest.approx((0.5 * 4 + 0.005 * 3 + 0.25 * 4) / 11), idle_job_hours=3.0, never_used_hours=1.0,
        never_used_known_hours=4.0 + 3.0, no_kernel_hours=pytest.approx(1.0 + 3.0), energy_kwh=3.0,
        energy_hours=8.0 + 3.0, wasted_kwh=pytest.approx(1.1), wasted_kwh_hours=4.0,
        mfu_frac=pytest.approx((0.3 * 4 + 0.1 * 4) / 8), mfu_hours=8.0,
    )  # fmt: skip
    assert (totals.total.idle_hours, totals.total.unused_hours) == (4.0, pytest.approx(8.0))
    assert (totals.users, totals.still_running) == (5, 1)


def test_every_job_stands_somewhere_and_none_without_telemetry_is_idle(totals: SiteTotals) -> None:
    assert set(totals.standings) == {
        Standing("ok", 2, 12.0),
        Standing("idle", 1, 3.0),
        Standing("no telemetry", 1, 10.0),
        Standing("not summarised", 1, 1.0),
        Standing("part of a job that was requeued or resized", 1, 1.0),
    }


def test_the_parts_of_each_breakdown_make_up_the_whole(totals: SiteTotals) -> None:
    assert {name: share.hours for name, share in totals.parts["partition"].items()} == {"gpu": 23.0, "mig": 4.0}
    assert list(totals.parts["account"]) == ["a", "b", "bob"]
    assert set(totals.parts["gpu_type"]) == {"A100-80", "A100-40", ""}
    for parts in totals.parts.values():
        for field in dataclasses.fields(Share):
            if field.name not in ("util_frac", "mfu_frac"):
                known = [getattr(share, field.name) for share in parts.values()]
                whole = getattr(totals.total, field.name)
                assert sum(value for value in known if value is not None) == pytest.approx(whole), field.name


def test_what_nobody_measured_is_not_known(totals: SiteTotals, tmp_path: Path) -> None:
    unmeasured = totals_of(tmp_path / "other", JOBS[2:3], METRICS[2:3]).total
    assert (unmeasured.hours, unmeasured.measured_hours) == (10.0, 0.0)
    assert (unmeasured.util_frac, unmeasured.unused_hours, unmeasured.energy_kwh, unmeasured.wasted_kwh) == (None,) * 4


def test_energy_of_idle_gpus_is_unknown_where_one_of_them_has_none(tmp_path: Path) -> None:
    idle = [{**METRICS[0], "idle_gpus": ["n1:2", "n1:3"]}]
    found = totals_of(tmp_path, JOBS[:1], idle, [gpu(1, 2, True, None), gpu(1, 3, True, KWH)]).total
    assert (found.wasted_kwh, found.wasted_kwh_hours, found.never_used_hours) == (None, 0.0, 2.0)


def test_gpus_never_used_are_not_0_where_activity_is_not_known(tmp_path: Path) -> None:
    """A MIG job whose engine was active a quarter of 4 hours: 3 without a kernel, on which GPUs nobody knows."""
    found = totals_of(tmp_path, [JOBS[5]], [{**METRICS[4], "energy_j": KWH}]).total
    assert (found.never_used_hours, found.never_used_known_hours) == (None, 0.0)
    assert (found.no_kernel_hours, found.unused_hours, found.idle_hours) == (3.0, 3.0, None)
    assert (found.energy_kwh, found.wasted_kwh, found.wasted_kwh_hours) == (1.0, None, 0.0)


def test_who_asked_for_the_largest_tier_and_did_not_need_it(tmp_path: Path) -> None:
    """40 GiB less 1 GiB of headroom, less 2% for spikes: 39,153 MiB."""
    peaks = {1: 39_100.0, 2: 39_200.0, 3: 1000.0, 4: 1000.0, 5: 2000.0, 6: 1000.0, 7: None}
    more = {4: {"state": "FAILED"}, 5: {"state": "CANCELLED by 1000"}, 6: {"tier": "hbm40g"}}
    jobs = [job(number, 1, number, **{"tier": "hbm80g", **more.get(number, {})}) for number in peaks]
    jobs += [job(8, 1, 2, tier="hbm80g", user="bob"), job(9, 1, 2, tier="hbm80g", user="carol"), job(10, 1, 2)]
    measured = [metrics(number, hbm_peak_mib=peak, is_preallocated=number == 3) for number, peak in peaks.items()]
    measured += [metrics(number, hbm_peak_mib=500.0, is_preallocated=False) for number in (8, 10)]
    measured += [metrics(9, hbm_peak_mib=80_000.0, is_preallocated=False)]
    largest = totals_of(tmp_path, jobs, measured).largest
    assert (largest.names, largest.smaller) == (("hbm80g",), "hbm40g")
    assert largest.limit_mib == pytest.approx(39_152.94, abs=0.01)
    assert (largest.asked_jobs, largest.known_jobs, largest.fit_jobs) == (8, 5, 3)
    found = [(user.user, user.asked_jobs, user.known_jobs, user.fit_jobs, user.fit_hours) for user in largest.users]
    assert found == [("alice", 6, 3, 2, 6.0), ("bob", 1, 1, 1, 2.0)]
    assert (largest.users[0].median_peak_mib, largest.users[0].highest_peak_mib) == (39_100.0, 39_200.0)


@pytest.mark.parametrize("tiers", [(), TIERS[:1]])
def test_without_two_sizes_of_memory_nothing_is_said_of_the_largest(tmp_path: Path, tiers: tuple[Tier, ...]) -> None:
    largest = totals_of(tmp_path, JOBS, METRICS, config=Config(tiers=tiers)).largest
    assert "configured" in largest.why_none
    assert largest.users == ()


def test_an_empty_store_has_no_jobs_and_a_damaged_one_says_so(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "store")
    assert load(store).total.jobs == 0
    store.of(CLUSTER).write("jobs", pa.Table.from_pylist(JOBS, schema=TABLES["jobs"].schema))
    for path in store.of(CLUSTER).files("jobs"):
        path.write_bytes(b"PAR1 nothing PAR1")
    with pytest.warns(DamageWarning):
        assert load(store).total.jobs == 0
