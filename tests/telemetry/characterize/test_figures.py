"""Each table, by a few jobs whose figures can be worked out by hand, and the values of the paper's text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import spearmanr

from almanac.config import Config
from telemetry.characterize.study import FINDINGS, note_on
from telemetry.store.store import Store

Any_ = Any
PIPES = ("fp64", "fp32", "fp16", "tensor")


def means(fp64: float | None = 0.0, fp32: float | None = 0.0, fp16: float | None = 0.0, tensor: float | None = 0.0,
          **more: Any) -> dict[str, Any]:  # fmt: skip
    values = zip(PIPES, (fp64, fp32, fp16, tensor), strict=True)
    return {**{f"mean_{pipe}_active_frac": value for pipe, value in values}, **more}


def test_size_classes_hold_their_lower_edge(job: Any_, rows: Any_) -> None:
    sizes = [2, 3, 4, 8, 9, 512, 513, 4096]
    found = rows("fig01_job_size", [job(gpu_count=size) for size in sizes])
    by_class = {row["gpus_from"]: row["jobs"] for row in found}
    assert by_class == {1: 1, 3: 2, 5: 1, 9: 1, 17: 0, 33: 0, 65: 0, 129: 0, 257: 1, 513: 2}
    assert found[0]["gpus_below"] == 3
    assert found[-1]["gpus_below"] is None
    assert found[1]["share"] == 2 / 8
    assert found[1]["gpu_hours"] == 7.0
    assert found[1]["gpu_hours_share"] == pytest.approx(7 / sum(sizes))


def test_durations_and_utilization_are_quantiles_between_order_statistics(job: Any_, rows: Any_) -> None:
    jobs = [job(elapsed_s=3600 * hours, mean_gpu_util_pct=10.0 * hours) for hours in (1, 2, 3, 4, 5)]
    (hours,) = rows("fig01_duration", jobs)
    assert hours == {"gpus_from": 3, "gpus_below": 5, "jobs": 5, "mean_elapsed_h": 3.0, "p5_elapsed_h": 1.2,
                     "p25_elapsed_h": 2.0, "p50_elapsed_h": 3.0, "p75_elapsed_h": 4.0,
                     "p95_elapsed_h": pytest.approx(4.8)}  # fmt: skip
    (util,) = rows("fig01_gpu_util", jobs)
    assert (util["p50_gpu_util_pct"], util["mean_gpu_util_pct"]) == (30.0, 30.0)


def test_gr_engine_active_stands_in_for_gpu_util_under_mig(job: Any_, rows: Any_) -> None:
    (found,) = rows("fig01_gpu_util", [job(mean_gr_engine_active_frac=0.5), job(mean_gpu_util_pct=30.0)])
    assert (found["jobs"], found["mean_gpu_util_pct"]) == (2, 40.0)


def test_pipe_mixes_are_disjoint_and_an_unknown_pipe_is_no_unused_one(job: Any_, rows: Any_) -> None:
    jobs = [
        job(**means(fp64=0.3, mean_gpu_util_pct=40.0)),
        job(**means(fp64=0.2, mean_gpu_util_pct=60.0)),
        job(**means(fp64=0.1, tensor=0.2, mean_gpu_util_pct=80.0)),
        job(**means(fp64=0.004)),
        job(**means(fp64=None, tensor=0.2)),
    ]
    found = [row for row in rows("fig02_pipe_mix", jobs) if row["rule"] == "notebooks"]
    mixes = {(row["pipes"], row["pipes_unknown"]): (row["jobs"], row["mean_gpu_util_pct"]) for row in found}
    assert mixes == {
        ("fp64", ""): (2, 50.0),
        ("fp64+tensor", ""): (1, 80.0),
        ("none", ""): (1, None),
        ("tensor", "fp64"): (1, None),
    }
    assert all(row["threshold_fp64_frac"] == 0.005 for row in found)


def test_the_papers_rule_takes_the_5th_percentile_where_it_is_larger(job: Any_, rows: Any_) -> None:
    jobs = [job(**means(fp64=value / 100)) for value in range(1, 22)]
    found = {row["rule"]: row for row in rows("fig02_pipe_mix", jobs) if row["pipes"] == "fp64"}
    assert found["paper"]["threshold_fp64_frac"] == pytest.approx(0.02)
    assert (found["paper"]["jobs"], found["notebooks"]["jobs"]) == (19, 21)


def peak(frac: float, tier: str | None = "hbm80g", is_preallocated: bool | None = False) -> dict[str, Any]:
    return {"hbm_peak_mib": 81920 * frac, "hbm_peak_frac": frac, "hbm_capacity_mib": 81920.0, "tier": tier,
            "is_preallocated": is_preallocated}  # fmt: skip


def test_hbm_peaks_fall_into_half_open_bins(job: Any_, rows: Any_) -> None:
    jobs = [job(**peak(frac)) for frac in (0.0, 0.05, 0.0999, 0.15, 0.5, 1.0, 1.01)]
    found = rows("fig03_hbm_peak", jobs)
    filled = {(row["hbm_peak_frac_from"], row["hbm_peak_frac_below"]): row["jobs"] for row in found if row["jobs"]}
    assert filled == {(0.0, 0.05): 1, (0.05, 0.1): 2, (0.15, 0.2): 1, (0.5, 0.55): 1, (1.0, None): 2}
    assert len(found) == 21
    assert found[3]["cumulative_share"] == 4 / 7
    assert found[-1]["cumulative_share"] == 1.0


def test_preallocated_peaks_stand_apart_and_tiers_are_told_apart(job: Any_, rows: Any_) -> None:
    jobs = [
        job(**peak(0.1)), job(**peak(0.5)), job(**peak(0.51)), job(**peak(0.9, is_preallocated=True)),
        job(**peak(0.2, tier="hbm40g")), job(**peak(0.3, tier=None, is_preallocated=None)),
    ]  # fmt: skip
    found = {(row["tier"], row["reserved"]): row for row in rows("fig03_hbm_peak_shares", jobs)}
    assert set(found) == {
        ("hbm80g", "all"), ("hbm80g", "not preallocated"), ("hbm80g", "preallocated"),
        ("hbm40g", "all"), ("hbm40g", "not preallocated"), (None, "all"), (None, "cannot be told"),
    }  # fmt: skip
    large = found["hbm80g", "all"]
    assert large == {"tier": "hbm80g", "is_largest_tier": True, "hbm_capacity_mib": 81920.0, "reserved": "all",
                     "jobs": 4, "share_below_20pct": 0.25, "share_at_most_50pct": 0.5, "share_at_least_80pct": 0.25,
                     "share_at_least_90pct": 0.25}  # fmt: skip
    assert found["hbm80g", "not preallocated"]["share_at_most_50pct"] == 2 / 3
    assert found["hbm40g", "all"]["share_below_20pct"] == 0.0
    assert (found["hbm40g", "all"]["is_largest_tier"], found[None, "all"]["is_largest_tier"]) == (False, None)


def bins(**places: int) -> list[int]:
    """32 counts; `at3=5` puts 5 samples into the fourth bin."""
    counts = [0] * 32
    for name, number in places.items():
        counts[int(name.removeprefix("at"))] = number
    return counts


def test_intensity_histograms_add_up_by_pipe_and_gpu(job: Any_, rows: Any_) -> None:
    small = {"gpu_model": "A100-40", "hbm_capacity_mib": 40960.0}
    jobs = [
        job(intensity_bins_fp64=bins(at0=1, at20=2), **small),
        job(intensity_bins_fp64=bins(at20=3), intensity_bins_tensor=bins(at31=7), **small),
        job(intensity_bins_fp64=bins(at1=4), gpu_model="A100-80", hbm_capacity_mib=81920.0),
    ]
    found = rows("fig04_intensity", jobs)
    assert len(found) == 3 * 32
    filled = {
        (r["pipe"], r["gpu_model"], round(r["intensity_from_flop_per_byte"], 4)): r for r in found if r["samples"]
    }
    assert {key: row["samples"] for key, row in filled.items()} == {
        ("fp64", "A100-40", 0.0): 1,
        ("fp64", "A100-40", 6.3096): 5,
        ("tensor", "A100-40", 1000.0): 7,
        ("fp64", "A100-80", 0.001): 4,
    }
    middle = filled["fp64", "A100-40", 6.3096]
    assert (middle["share"], middle["jobs"]) == (pytest.approx(5 / 6), 2)
    assert middle["intensity_below_flop_per_byte"] == pytest.approx(10.0)
    assert middle["ridge_flop_per_byte"] == pytest.approx(9.7e12 / 1.555e12)
    assert filled["tensor", "A100-40", 1000.0]["intensity_below_flop_per_byte"] is None


def test_class_shares_by_job_and_weighted_by_samples(job: Any_, rows: Any_) -> None:
    jobs = [
        job(class_fp64="memory", compute_sample_frac_fp64=0.0, placed_samples_fp64=300, job_class="compute",
            main_pipe="tensor", class_tensor="compute", compute_sample_frac_tensor=1.0, placed_samples_tensor=100),
        job(class_fp64="compute", compute_sample_frac_fp64=0.8, placed_samples_fp64=100, job_class="compute",
            main_pipe="fp64"),
    ]  # fmt: skip
    found = {(row["class_by"], row["counted_in"]): row for row in rows("fig04_class_shares", jobs)}
    assert found["fp64", "jobs"]["memory_share"] == 0.5
    assert found["fp64", "samples"]["compute_share"] == pytest.approx(0.2)
    assert (found["tensor", "jobs"]["jobs"], found["tensor", "jobs"]["compute_share"]) == (1, 1.0)
    assert found["main pipe", "samples"]["compute_share"] == pytest.approx((100 + 80) / 200)
    assert ("fp32", "jobs") not in found


def test_energy_by_gpu_hours_and_either_class(job: Any_, rows: Any_) -> None:
    jobs = [
        job(energy_j=100.0, gpu_count=1, class_fp64="memory", job_class="compute"),
        job(energy_j=300.0, gpu_count=2, class_fp64="memory"),
        job(energy_j=500.0, gpu_count=3, class_fp64="memory"),
    ]
    found = {(row["class_by"], row["class"], row["gpu_hours_from"]): row for row in rows("fig05_energy", jobs)}
    assert set(found) == {("fp64", "memory", 1.0), ("fp64", "memory", 3.0), ("main pipe", "compute", 1.0)}
    one_to_three = found["fp64", "memory", 1.0]
    assert (one_to_three["gpu_hours_below"], one_to_three["jobs"], one_to_three["mean_energy_j"]) == (3.0, 2, 200.0)


@pytest.mark.parametrize(("metric", "table"), [("spatial", "fig06_spatial"), ("temporal", "fig07_temporal")])
def test_imbalance_by_utilization_band(job: Any_, rows: Any_, metric: str, table: str) -> None:
    pairs = [(29.9, 0.7), (30.0, 0.29), (69.9, 0.3), (70.0, 0.0), (100.0, 1.0), (10.0, 0.1)]
    jobs = [job(mean_gpu_util_pct=util, **{f"{metric}_imbalance": value}) for util, value in pairs]
    shares = {row["gpu_util_from_pct"]: row for row in rows(f"{table}_shares", jobs)}
    assert [shares[low]["jobs"] for low in (0, 30, 70)] == [2, 2, 2]
    assert [shares[low]["share_below_30pct"] for low in (0, 30, 70)] == [0.5, 0.5, 0.5]
    assert [shares[low]["share_at_least_70pct"] for low in (0, 30, 70)] == [0.5, 0.0, 0.5]
    assert shares[30][f"p50_{metric}_imbalance"] == pytest.approx(0.295)
    found = rows(f"{table}_by_util", jobs)
    assert len(found) == 3 * 20
    top = found[-1]
    assert (top[f"{metric}_imbalance_from"], top[f"{metric}_imbalance_below"], top["jobs"]) == (0.95, 1.0, 1)


def test_imbalance_that_rounding_put_below_0_counts_to_the_first_bin(job: Any_, rows: Any_) -> None:
    found = rows("fig06_spatial_by_util", [job(mean_gpu_util_pct=50.0, spatial_imbalance=-1e-17)])
    assert (found[0]["spatial_imbalance_from"], found[0]["jobs"]) == (0.0, 1)


def test_imbalance_by_pipes_and_class(job: Any_, rows: Any_) -> None:
    jobs = [
        job(**means(fp64=0.3), spatial_imbalance=0.2, class_fp64="memory", job_class="memory"),
        job(**means(fp64=0.3), spatial_imbalance=0.4, class_fp64="memory", job_class="compute"),
        job(**means(tensor=0.3), spatial_imbalance=0.6, class_fp64="compute"),
    ]
    by_pipes = [row for row in rows("fig08_spatial_by_pipes", jobs) if row["rule"] == "notebooks"]
    medians = [(row["pipes"], row["jobs"], row["p50_spatial_imbalance"]) for row in by_pipes]
    assert medians == [("fp64", 2, pytest.approx(0.3)), ("tensor", 1, 0.6)]
    by_class = {(r["class_by"], r["class"]): r["p50_spatial_imbalance"] for r in rows("fig08_spatial_by_class", jobs)}
    assert by_class == {
        ("fp64", "memory"): pytest.approx(0.3), ("fp64", "compute"): 0.6,
        ("main pipe", "memory"): 0.2, ("main pipe", "compute"): 0.4,
    }  # fmt: skip


def test_the_heatmap_has_a_row_per_bin_that_has_jobs(job: Any_, rows: Any_) -> None:
    def at(fp64: float, dram: float, util: float) -> dict[str, Any]:
        more = {"mean_dram_active_frac": dram, "mean_gpu_util_pct": util, "class_fp64": "memory"}
        return job(mean_fp64_active_frac=fp64, **more)

    jobs = [at(0.05, 0.44, 50), at(0.09, 0.41, 70), at(0.0, 1.0, 90)]
    found = rows("fig10_heatmap", jobs)
    columns = ("fp64_active_from_frac", "dram_active_from_frac", "jobs", "mean_gpu_util_pct")
    assert [tuple(row[name] for name in columns) for row in found] == [(0.0, 0.95, 1, 90.0), (0.05, 0.4, 2, 60.0)]
    by_counter = {row["counter"]: row for row in rows("fig10_correlations", jobs)}
    assert by_counter["mean_dram_active_frac"]["spearman"] == pytest.approx(0.5)
    assert by_counter["mean_fp64_active_frac"]["spearman"] == pytest.approx(-0.5)


def test_spearman_is_of_the_jobs_that_know_both_with_ties_averaged(job: Any_, rows: Any_) -> None:
    util = [10.0, 20.0, 20.0, 40.0, 50.0, 60.0]
    power = [100.0, 100.0, 300.0, None, 200.0, 400.0]
    jobs = [
        job(mean_gpu_util_pct=a, mean_power_w=b, mean_temp_c=40.0) for a, b in zip(util, power, strict=True)
    ]  # fmt: skip
    found = {(row["counter_a"], row["counter_b"]): row for row in rows("fig11_spearman", jobs)}
    pair = found["mean_gpu_util_pct", "mean_power_w"]
    # Ranks 1, 2.5, 2.5, 4, 5 and 1.5, 1.5, 4, 3, 5: products of the deviations 7.25, squares 9.5 each.
    assert (pair["jobs"], pair["spearman"]) == (5, pytest.approx(7.25 / 9.5))
    assert pair["spearman"] == pytest.approx(spearmanr([10, 20, 20, 50, 60], [100, 100, 300, 200, 400]).statistic)
    constant = found["mean_gpu_util_pct", "mean_temp_c"]
    assert (constant["jobs"], constant["spearman"]) == (6, None)
    nobody = found["mean_gpu_util_pct", "mean_sm_active_frac"]
    assert (nobody["jobs"], nobody["spearman"]) == (0, None)
    first = rows("fig11_spearman", jobs)[0]
    assert (first["counter_a"], first["place"]) == ("mean_gpu_util_pct", 1)


def test_idle_gpus_are_counted_where_every_gpu_was_seen(job: Any_, rows: Any_) -> None:
    idle = {"temporal_imbalance": 0.5, "idle_gpus": ["n1:1", "n1:2", "n1:3"]}
    busy = {"temporal_imbalance": 0.5, "idle_gpus": []}
    jobs = [job(**idle), job(**busy), job(**busy), job(**{**idle, "gpus_seen": 3}), job(idle_gpus=[])]
    found = {row["idle_gpu_count"]: (row["jobs"], row["share"]) for row in rows("sec06_idle_gpus", jobs)}
    assert found == {0: (2, pytest.approx(2 / 3)), 3: (1, pytest.approx(1 / 3))}


def test_a_share_of_nobody_among_somebody_is_0_and_without_tiers_there_is_no_largest(job: Any_, rows: Any_) -> None:
    jobs = [job(**means(fp32=0.3), **peak(0.3))]
    found = {row["finding"]: row for row in rows("headline", jobs, Config())}
    assert found["jobs that use only FP64"]["site_value"] == 0.0
    large = found["largest tier: HBM peak below 20%"]
    assert (large["site_value"], large["why_null"]) == (None, "no memory tiers are configured")
    assert not math.isnan(found["jobs of 3 or 4 GPUs"]["site_value"])


def job_of(job: Any_, util: float, spatial: float, temporal: float, *pipes: str, **more: Any) -> dict[str, Any]:
    means = {f"mean_{pipe}_active_frac": 0.2 if pipe in pipes else 0.0 for pipe in PIPES}
    made: dict[str, Any] = job(
        mean_gpu_util_pct=util, spatial_imbalance=spatial, temporal_imbalance=temporal, **means, **more
    )
    return made


def test_values_worked_out_by_hand(job: Any_, results: Any_) -> None:
    jobs = [
        job_of(job, 10.0, 0.2, 0.1, "fp64", class_fp64="memory", elapsed_s=3600),
        job_of(job, 20.0, 0.8, 0.9, "fp64", class_fp64="memory", elapsed_s=7200),
        job_of(job, 50.0, 0.1, 0.5, "fp32", "tensor", class_fp64="compute", elapsed_s=10_800),
        job_of(job, 80.0, 0.5, 0.8, "tensor", class_fp64="compute", gpu_count=64),
        job_of(job, 60.0, 0.3, 0.2, "tensor", class_fp64="compute", gpu_count=300),
    ]
    rows = results(jobs)["headline"].rows.to_pylist()
    found = {row["finding"]: row for row in rows}

    def value(words: str) -> tuple[float | None, int]:
        return found[words]["site_value"], found[words]["jobs"]

    assert value("jobs of 3 or 4 GPUs: mean duration") == (pytest.approx(2.0), 3)
    assert value("jobs of 3 or 4 GPUs: median GPU_UTIL") == (20.0, 3)
    assert value("jobs of 33 to 512 GPUs: mean GPU_UTIL") == (70.0, 2)
    assert value("jobs that use FP32 and tensor") == (pytest.approx(0.2), 5)
    assert value("jobs that use only FP64: mean GPU_UTIL") == (15.0, 2)
    assert value("jobs that use only tensor: mean GPU_UTIL") == (70.0, 2)
    assert value("GPU_UTIL below 30%: spatial imbalance below 0.3") == (0.5, 2)
    assert value("GPU_UTIL 30% to 70%: temporal imbalance below 0.3") == (0.5, 2)
    assert value("GPU_UTIL from 70%: temporal imbalance at least 0.7") == (1.0, 1)
    assert found["jobs of 5 to 8 GPUs: median GPU_UTIL"]["why_null"] == "no such jobs"
    assert found["largest tier: HBM peak at least 90%"]["why_null"] == "hbm_peak_mib: not known"


def test_no_finding_is_named_twice_and_each_reads_columns_that_its_table_has(job: Any_, results: Any_) -> None:
    names = [(finding.table, finding.words) for finding in FINDINGS]
    assert len(set(names)) == len(names)
    for finding in FINDINGS:
        assert finding.section and (finding.published is not None or finding.is_main), finding
        assert bool(finding.value) != bool(finding.share_of), finding
    rows = results([job_of(job, 50.0, 0.1, 0.1, "fp64")])["headline"].rows.to_pylist()
    assert all((row["site_value"] is None) == (row["why_null"] is not None) for row in rows)


def test_only_the_generated_site_is_said_to_agree_by_construction(tmp_path: Path) -> None:
    store = Store.create(tmp_path / "s").of("c")
    store.set_watermark("sacct", 1_750_000_000)
    assert note_on(store) == ""
    store.set_watermark("generated", 1_750_000_000)
    assert "set by quota" in note_on(store)
