"""The values of the paper's text: each is read from the right rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from telemetry.characterize.headline import FINDINGS, note_on
from telemetry.store.store import Store

Any_ = Any
PIPES = ("fp64", "fp32", "fp16", "tensor")


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
