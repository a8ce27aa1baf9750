"""A job's data as the report has it."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from reports.job.evidence import figure_rows, slice_text
from reports.job.facts import facts_of
from reports.job.job_report import GpuRow, GpuSeries, JobRow, MetricsRow
from reports.job.series import MAX_CELLS, SeriesRequest, SiteFigures
from reports.job.sources import requeued
from telemetry.store.schema import TABLES
from telemetry.store.store import Store


def busy(series: GpuSeries) -> npt.NDArray[np.float64]:
    return np.array(series.values["gpu_util_pct"], np.float64)


KINDS: dict[str, Any] = {
    "int64": int, "int16": int, "double": float, "string": str, "bool": bool,
    "list<item: string>": list[str], "list<item: int64>": list[int],
}  # fmt: skip


@pytest.mark.parametrize(("row", "table"), [(JobRow, "jobs"), (MetricsRow, "job_metrics"), (GpuRow, "gpu_metrics")])
def test_typed_rows_have_columns_of_the_store(row: type, table: str) -> None:
    """Each column with its type, and None where a value can be missing; of jobs all. Estimates are the report's own."""
    columns = {
        field.name: KINDS[str(field.type)] | None if field.nullable else KINDS[str(field.type)]
        for field in TABLES[table].schema
    }
    known = {name: kind for name, kind in get_type_hints(row).items() if "_estimate_" not in name}
    assert known == {name: columns[name] for name in known}
    assert row is not JobRow or known == columns


def test_every_gpu_has_a_row_of_its_own_samples(reported: Any) -> None:
    series = reported.contexts["idle"].series
    assert series.units == ("n2:0", "n2:1", "n2:2", "n2:3")
    # Two samples of 10 s a bin, one hour.
    assert busy(series).shape == (4, 180)
    assert np.nanmax(busy(series)[[0, 2, 3]]) == 0
    assert np.nanmean(busy(series)[1]) == pytest.approx(80, abs=1)
    # The highest use of a bin, in the first already half of what the job reaches.
    assert series.values["hbm_used_mib"][1][-1] == pytest.approx(12.5 * 1024)


def test_missing_samples_stay_missing_and_a_job_without_any_has_no_series(reported: Any) -> None:
    util_pct = busy(reported.contexts["half"].series)
    # 2,200 s of 3,600 s were measured, 110 bins of 180.
    assert np.isfinite(util_pct[:, :110]).all()
    assert np.isnan(util_pct[:, 110:]).all()

    assert reported.contexts["no-telemetry"].series is None
    assert reported.contexts["never-started"].series is None
    assert reported.contexts["never-started"].elapsed_s is None


def test_mig_instances_are_told_apart(reported: Any) -> None:
    context = reported.contexts["mig"]
    assert context.series.units == ("n8:0:1", "n8:0:2")
    assert context.is_mig
    assert np.nanmean(busy(context.series)) == pytest.approx(55, abs=1)


def test_a_report_names_the_slices_with_the_memory_that_they_have(reported: Any) -> None:
    context = reported.contexts["mig"]
    rows = {row.name: row.value for row in figure_rows(context)}
    assert (rows["MIG slices"], rows["Peak GPU memory"]) == ("3g.40gb, 39.2 GiB", "4.0 GiB of 39.2 GiB")
    assert not any(name.startswith("MIG") for name in {row.name for row in figure_rows(reported.contexts["balanced"])})
    assert "of 39.2 GiB" in facts_of(context).words["peak_of"]


@pytest.mark.parametrize(
    ("profile", "capacity_mib", "text"),
    [("1g.10gb", 9728.0, "1g.10gb, 9.5 GiB"), ("1g.10gb", None, "1g.10gb, memory not measured"),
     (None, 9728.0, "profile not known, 9.5 GiB")],
)  # fmt: skip
def test_what_is_not_known_of_a_slice_is_said(profile: str | None, capacity_mib: float | None, text: str) -> None:
    assert slice_text(profile, capacity_mib) == text


@pytest.mark.parametrize(("tier_mib", "is_larger"), [(10_240, False), (9_728, False), (20_480, True)])
def test_a_tier_of_the_same_slice_by_its_nominal_size_is_no_larger_one(
    reported: Any, tier_mib: int, is_larger: bool
) -> None:
    context = reported.contexts["mig"]
    own = {"hbm_capacity_mib": 9_728.0, "hbm_peak_mib": 8_000.0}
    tier = dataclasses.replace(context.tiers[0], capacity_mib=tier_mib)
    on_slice = dataclasses.replace(context, metrics={**context.metrics, **own}, tiers=(tier,))
    values = facts_of(on_slice).values
    assert (values["has_larger_tier"], values["has_smaller_tier"]) == (is_larger, False)


def test_a_requeued_job_is_its_last_run(reported: Any) -> None:
    context = reported.contexts["requeued"]
    assert [run["state"] for run in context.earlier_runs] == ["REQUEUED"]
    assert context.elapsed_s == 1200
    assert np.nanmean(busy(context.series)) == pytest.approx(85, abs=1)


def test_an_older_job_of_the_same_user_and_number_is_no_earlier_run(reported: Any) -> None:
    """Slurm gives numbers again; a requeued job is submitted when its run before ends."""
    context = reported.contexts["requeued"]
    [earlier], job = context.earlier_runs, context.job
    older = {**earlier, "submit_s": earlier["submit_s"] - 400 * 86_400, "end_s": earlier["end_s"] - 400 * 86_400}
    assert requeued([older, earlier], job) == (earlier,)
    assert requeued([older], job) == ()


def test_jobs_come_in_the_order_asked_and_unknown_ones_are_left_out(reported: Any) -> None:
    found = reported.build(701, 999_999, 101, 701)
    assert [context.job_id for context in found] == [701, 101]
    assert reported.build(999_999) == []


def test_a_job_says_the_same_alone_and_with_others(reported: Any) -> None:
    (alone,) = reported.build(401)
    together = reported.contexts["half"]
    assert alone.metrics == together.metrics
    assert alone.ranks == together.ranks
    assert alone.advice == together.advice
    np.testing.assert_array_equal(busy(alone.series), busy(together.series))


def test_a_packed_job_gets_no_advice_on_its_memory_tier(reported: Any, tmp_path: Path) -> None:
    """A tier for one task may not hold all that the job ran at once."""
    shutil.copytree(reported.store.root, tmp_path / "store")
    site = dataclasses.replace(reported, store=Store.open(tmp_path / "store"))
    jobs = site.store.of("test").read("jobs", among={"job_id": pa.array([401, 1002])})
    is_packed = pa.array([each == 401 for each in jobs["job_id"].to_pylist()])
    place = jobs.schema.get_field_index("is_packed")
    site.store.of("test").write("jobs", jobs.set_column(place, "is_packed", is_packed))
    packed, plain = site.build(401, 1002)
    (alone,) = site.build(401)
    assert (packed.advice, alone.advice, packed.packing) == (None, None, None)
    assert reported.contexts["half"].advice is not None
    assert plain.advice is not None
    assert packed.metrics == reported.contexts["half"].metrics


def test_a_rank_is_the_share_of_the_sites_jobs_with_less() -> None:
    submit_s = np.arange(40, dtype=np.int64) * 100
    figures = {"energy_j": np.concatenate([np.arange(30.0), np.full(10, np.nan)])}
    site = SiteFigures(submit_s, figures)
    metrics = {"verdict": "ok", "energy_j": 15.0}
    rank = site.ranks(metrics, 3900, 4000)["energy_j"]
    assert (rank.above, rank.below, rank.jobs) == (pytest.approx(14 / 30), pytest.approx(15 / 30), 30)
    # Too few jobs before, and no verdict: no rank.
    assert site.ranks(metrics, 1000, 1100) == {}
    assert site.ranks({"verdict": "short", "energy_j": 15.0}, 3900, 4000) == {}


@pytest.mark.parametrize("gpus", [1, 4, 64, 1024])
def test_the_grid_is_bounded_and_covers_the_job(gpus: int) -> None:
    units = tuple(("n", number, "") for number in range(gpus))
    for elapsed_s in (1, 15, 600, 86_399, 30 * 86_400):
        run = SeriesRequest(0, elapsed_s, units, 10.0)
        assert 1 <= run.bins() <= 600
        assert run.bins() * gpus <= max(MAX_CELLS, 60 * gpus)
        assert (run.bins() - 1) * run.bin_ms() < elapsed_s * 1000 <= run.bins() * run.bin_ms()
        assert run.bins() == 1 or run.bin_ms() >= 20_000
