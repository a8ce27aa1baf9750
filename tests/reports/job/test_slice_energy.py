"""Estimates of the energy of MIG slices: the card's, by the slices' shares of its activity."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from reports.job.job_report import GpuRow, JobRow
from reports.job.slice_energy import energy_row, estimate_energy
from telemetry.history import plain_rows
from telemetry.store.schema import TABLES
from telemetry.store.store import ClusterStore, Store

NOW_S = 1_790_000_000


def job(job_id: int, start_s: int, end_s: int | None, **more: Any) -> dict[str, Any]:
    known: dict[str, Any] = {"gpu_count": 1, "node_list": "n1", "user": "ann", "state": "COMPLETED"}
    times = {"start_s": NOW_S + start_s, "end_s": None if end_s is None else NOW_S + end_s}
    return {"job_id": job_id, "submit_s": NOW_S - job_id, **times, **known, **more}


def on_slice(
    job_id: int, mig: str, util_pct: float | None, profile: str = "1g.5gb", host: str = "n1"
) -> dict[str, Any]:
    shown = {"mig_profile": profile, "gpu_model": "A100-40", "mean_gpu_util_pct": util_pct, "mean_power_w": 140.0}
    return {"job_id": job_id, "submit_s": NOW_S - job_id, "host": host, "gpu": 0, "mig": mig, **shown}


def estimates(folder: Path, jobs: list[dict[str, Any]], gpus: list[dict[str, Any]]) -> dict[int, tuple[float, float]]:
    store: ClusterStore = Store.create(folder / "store").of("demo")
    for table, rows in (("jobs", jobs), ("gpu_metrics", gpus)):
        store.write(table, pa.Table.from_pylist(rows, TABLES[table].schema))
    by_run: dict[tuple[int, int], list[GpuRow]] = {}
    for row in cast(list[GpuRow], plain_rows(store.read("gpu_metrics"))):
        by_run.setdefault((row["job_id"], row["submit_s"]), []).append(row)
    found = estimate_energy(store, cast(list[JobRow], plain_rows(store.read("jobs"))), by_run)
    return {run[0]: (row["power_estimate_w"], row["energy_estimate_j"]) for run, row in found.items()}


def test_slices_share_the_cards_power_by_activity_size_and_time(tmp_path: Path) -> None:
    """A 3g slice at 50% is as active as 1.5 slices of 1g; a job that was there half the time counts half."""
    jobs = [job(1, 0, 1000), job(2, 0, 1000, node_list="n[1-2]"), job(3, 500, 1000), job(4, 5000, 6000)]
    gpus = [
        on_slice(1, "7", 50.0, "3g.20gb"), on_slice(2, "9", 50.0), on_slice(3, "10", 100.0), on_slice(4, "7", 90.0),
        on_slice(2, "11", 0.0, host="n2"),
    ]  # fmt: skip
    found = estimates(tmp_path, jobs, gpus)
    assert found[1] == pytest.approx((140 * 1.5 / 2.5, 1000 * 140 * 1.5 / 2.5))
    assert found[3] == pytest.approx((140 * 1.0 / 3.0, 500 * 140 / 3))
    assert found[4] == pytest.approx((140, 140_000)), "alone on the card"
    assert found[2][0] == pytest.approx(140 * 0.5 / 2.5 + 140), "and all of a card that nobody used"


@pytest.mark.parametrize(
    ("jobs", "gpus"),
    [
        ([job(2, 500, 900)], []), ([job(2, 500, None)], []), ([job(2, 500, 900)], [on_slice(2, "9", None)]),
        ([job(2, 500, 900)], [on_slice(2, "9", 50.0, "")]),
    ],
)  # fmt: skip
def test_a_job_beside_it_without_figures_leaves_no_estimate(
    tmp_path: Path, jobs: list[dict[str, Any]], gpus: list[dict[str, Any]]
) -> None:
    found = estimates(tmp_path, [job(1, 0, 1000), *jobs], [on_slice(1, "7", 50.0), *gpus])
    assert not found
    apart = [{**each, "node_list": "n3"} for each in jobs]
    alone = estimates(tmp_path / "apart", [job(1, 0, 1000), *apart], [on_slice(1, "7", 50.0)])
    assert alone[1] == (140, 140_000)


def test_the_report_says_that_it_is_an_estimate() -> None:
    row = energy_row({"energy_estimate_j": 3.6e6, "power_estimate_w": 61.4})
    assert row and row.value == "about 1 kWh" and row.about.startswith("estimate: 61 W")
    measured = energy_row({"energy_j": 3.6e6, "energy_power_w": 200.0})
    assert measured and measured.value == "1 kWh" and "estimate" not in measured.about
    assert energy_row({"energy_estimate_j": 3.6e6}) is None
