"""Examples small enough to be computed by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from small_sites import side_by_side

from almanac.config import Bindings, Config, Filters
from telemetry.attribution.allocations import JobRun

START_S = 1_741_046_400  # midnight UTC
OPEN = Config(filters=Filters(min_elapsed_s=0, min_gpu_util_pct=-1.0, min_coverage=0.0))
STRICT = Config(filters=Filters(min_coverage=0.5))


def gpus(host: str, columns: dict[str, list[list[float]]], step_s: int = 10, start_s: int = START_S) -> pd.DataFrame:
    """Rows of one host: columns[name][gpu][sample], a sample every step_s."""
    frames = []
    number = len(next(iter(columns.values())))
    for gpu in range(number):
        values = {name: per_gpu[gpu] for name, per_gpu in columns.items()}
        length = len(next(iter(values.values())))
        times = (start_s + step_s * np.arange(length)) * 1000
        frames.append(pd.DataFrame({"host": host, "gpu": gpu, "mig": "", "time_ms": times, **values}))
    return pd.concat(frames, ignore_index=True)


def job(length_s: int, gpu_count: int, *, job_id: int = 1, start_s: int = START_S, **more: Any) -> JobRun:
    return JobRun(job_id, start_s, start_s, start_s + length_s, gpu_count, ("n1",), **more)


def test_the_mean_of_a_job_is_the_mean_of_its_gpus_means(run: Any) -> None:
    """GPU 0: (10 + 20) / 2 = 15 of two samples, GPU 1: 60 of one; (15 + 60) / 2 = 37.5, not (10 + 20 + 60) / 3."""
    frame = gpus("n1", {"gpu_util_pct": [[10, 20], [60, np.nan]]})
    jobs, gpu_rows = run(frame, [job(20, 2)])
    assert jobs[1]["mean_gpu_util_pct"] == 37.5
    assert [row["mean_gpu_util_pct"] for row in gpu_rows] == [15.0, 60.0]
    assert jobs[1]["coverage_gpu_util_pct"] == 0.75


def test_spatial_imbalance(run: Any) -> None:
    """Sums of 600 and 300: 1 - 900 / (2 * 600) = 0.25. Of 0 and 600: 0.5. Idle: 0. The mean is 0.25."""
    first, second = [100] * 6 + [0] * 6 + [0] * 6, [50] * 6 + [100] * 6 + [0] * 6
    jobs, _ = run(gpus("n1", {"gpu_util_pct": [first, second]}), [job(180, 2)])
    assert jobs[1]["spatial_imbalance"] == pytest.approx(0.25, rel=1e-15)
    assert jobs[1]["spatial_windows"] == 3


def test_windows_follow_the_clock(run: Any) -> None:
    """From 0:30 on, six samples each of 100 and 0, then 0 and 100: windows of 0.5, 0 (300 and 300), and 0.5."""
    one, other = [100] * 6 + [0] * 6, [0] * 6 + [100] * 6
    frame = gpus("n1", {"gpu_util_pct": [one, other]}, start_s=START_S - 90)
    task = job(120, 2, start_s=START_S - 90)
    assert run(frame, [task])[0][1]["spatial_imbalance"] == pytest.approx(1 / 3, rel=1e-15)


def test_imbalance_of_one_gpu_or_none_active_is_unknown_and_said(run: Any) -> None:
    jobs, _ = run(gpus("n1", {"gpu_util_pct": [[50] * 6]}), [job(60, 1)])
    assert jobs[1]["spatial_imbalance"] is None
    assert "spatial_imbalance: one GPU" in jobs[1]["reasons"]
    jobs, _ = run(gpus("n1", {"gpu_util_pct": [[0] * 6, [0] * 6]}), [job(60, 2)])
    assert jobs[1]["spatial_imbalance"] is None
    assert "spatial_imbalance: never active" in jobs[1]["reasons"]
    assert jobs[1]["temporal_imbalance"] == 0.0
    assert jobs[1]["idle_gpus"] == ["n1:0", "n1:1"]


def test_temporal_imbalance_is_that_of_the_least_steady_gpu(run: Any) -> None:
    """GPU 0 is steady: 0. GPU 1: 1 - 100 / (4 * 100) = 0.75. GPU 2 is idle: 0."""
    frame = gpus("n1", {"gpu_util_pct": [[50] * 4, [100, 0, 0, 0], [0] * 4]})
    jobs, gpu_rows = run(frame, [job(40, 3)])
    assert [row["temporal_imbalance"] for row in gpu_rows] == [0.0, 0.75, 0.0]
    assert jobs[1]["temporal_imbalance"] == 0.75
    assert jobs[1]["idle_gpus"] == ["n1:2"]


@pytest.mark.parametrize("hour", [1, 24], ids=["hour", "midnight"])
def test_energy_and_time_weight_carry_over_hours_and_days(run: Any, hour: int) -> None:
    """Samples 20 s before and 40 s after the full hour: memory-bound for 60 s, then compute-bound for 10 s."""
    at = START_S + hour * 3600
    rows = {"time_ms": [(at - 20) * 1000, (at + 40) * 1000, (at + 50) * 1000], "energy_mj": [1e6, 7e6, 8e6]}
    frame = pd.DataFrame({"host": "n1", "gpu": 0, "mig": "", **rows, "fp64_active_frac": [0.1, 0.9, 0.9]})
    frame["dram_active_frac"] = 0.5
    jobs, _ = run(frame, [job(80, 1, start_s=at - 20)])
    assert jobs[1]["energy_j"] == pytest.approx(7000 / 70 * 80, rel=1e-12)
    assert jobs[1]["compute_frac_fp64"] == pytest.approx(10 / 70, rel=1e-15)
    assert jobs[1]["compute_sample_frac_fp64"] == pytest.approx(2 / 3, rel=1e-15)
    assert jobs[1]["class_fp64"] == "memory"


def test_samples_that_the_roofline_cannot_place_lend_their_time_to_the_one_before(run: Any) -> None:
    """Compute for 30 s (two samples without FP activity follow), memory for 10 s; without DRAM traffic: compute."""
    fp64, dram = [0.8, 0.0, 0.0, 0.1, 0.4, 0.1], [0.2, 0.5, 0.5, 0.5, 0.0, 0.5]
    jobs, _ = run(gpus("n1", {"fp64_active_frac": [fp64], "dram_active_frac": [dram]}), [job(60, 1)])
    assert jobs[1]["compute_frac_fp64"] == pytest.approx(40 / 50, rel=1e-15)
    assert jobs[1]["compute_sample_frac_fp64"] == 0.5
    assert (jobs[1]["class_fp64"], jobs[1]["job_class"], jobs[1]["main_pipe"]) == ("compute", "compute", "fp64")


def test_the_class_is_told_of_the_pipe_that_the_job_uses(run: Any) -> None:
    """A tensor job is memory-bound to the FP64 rule; by the pipe that it uses it is compute-bound."""
    columns = {"fp64_active_frac": 0.001, "tensor_active_frac": 0.6, "dram_active_frac": 0.3}
    frame = gpus("n1", {name: [[value] * 6] for name, value in columns.items()})
    jobs, _ = run(frame, [job(60, 1)])
    assert (jobs[1]["class_fp64"], jobs[1]["class_tensor"], jobs[1]["job_class"]) == ("memory", "compute", "compute")
    assert (jobs[1]["main_pipe"], jobs[1]["pipes_used"]) == ("tensor", ["tensor"])


def test_flops_and_intensity_of_a_known_gpu(run: Any) -> None:
    """A100-40: 0.5 * 9.7e12 flop/s by 0.25 * 1.555e12 bytes/s is 12.476 flop/byte: bin 20, 10 ** 1.0 .. 1.2."""
    frame = gpus("n1", {"fp64_active_frac": [[0.5] * 6], "dram_active_frac": [[0.25] * 6]})
    row = run(frame, [job(60, 1)])[0][1]
    assert (row["flops_fp64"], row["hbm_bytes_s"]) == (4.85e12, 3.8875e11)
    assert row["intensity_fp64"] == pytest.approx(12.47588424437299, rel=1e-14)
    assert [(b, n) for b, n in enumerate(row["intensity_bins_fp64"]) if n] == [(1 + 20, 6)]


def test_without_a_counter_its_class_is_null_with_a_reason(run: Any) -> None:
    frame = gpus("n1", {"tensor_active_frac": [[0.5] * 6], "dram_active_frac": [[0.25] * 6]})
    row = run(frame, [job(60, 1)])[0][1]
    assert row["class_fp64"] is None
    assert "class_fp64: no FP64 counter" in row["reasons"]
    assert row["class_tensor"] == "compute"
    assert row["energy_j"] is None
    assert "energy_j: no energy counter" in row["reasons"]


def test_an_unknown_gpu_has_no_capacity_no_share_and_no_flops_and_that_is_said(run: Any) -> None:
    columns = {"hbm_used_mib": 1000.0, "fp64_active_frac": 0.5, "dram_active_frac": 0.25}
    frame = gpus("n1", {name: [[value] * 6] for name, value in columns.items()}).assign(model="NVIDIA X1")
    row = run(frame, [job(60, 1)])[0][1]
    assert row["hbm_peak_mib"] == 1000.0
    assert row["gpu_model"] == "NVIDIA X1"
    for name in ("hbm_capacity_mib", "hbm_peak_frac", "is_preallocated", "flops_fp64", "intensity_fp64"):
        assert row[name] is None, name
    assert row["class_fp64"] == "compute"  # the ridge is where both fractions are equal, on every GPU
    assert "hbm_peak_frac: no total memory counter" in row["reasons"]


def test_the_peak_is_that_of_the_highest_gpu_and_when_it_first_stood(run: Any) -> None:
    row = run(gpus("n1", {"hbm_used_mib": [[10, 30, 20], [40, 10, 40]]}), [job(30, 2)])[0][1]
    assert (row["hbm_peak_mib"], row["hbm_peak_ms"]) == (40.0, START_S * 1000)
    assert row["hbm_peak_frac"] == 40 / 40960


def test_growth_is_that_of_the_fastest_growing_gpu(run: Any) -> None:
    """10 MiB every 10 s is 3600 MiB an hour."""
    row = run(gpus("n1", {"hbm_used_mib": [[100, 110, 120, 130], [5, 5, 5, 5]]}), [job(40, 2)])[0][1]
    assert row["hbm_growth_mib_h"] == pytest.approx(3600, rel=1e-9)


@pytest.mark.parametrize(
    ("level_mib", "wobble_mib", "expected"),
    [(0.75 * 40960 + 400, 0, True), (39_900, 100, True), (0.5 * 40960, 0, False), (0.75 * 40960, 2000, False)],
    ids=["JAX", "TensorFlow", "flat elsewhere", "not flat"],
)
def test_preallocation_is_a_flat_use_near_a_share_that_frameworks_reserve(
    run: Any, level_mib: float, wobble_mib: float, expected: bool
) -> None:
    use = [500.0] * 3 + [level_mib - wobble_mib * (n % 2) for n in range(94)] + [500.0] * 3
    row = run(gpus("n1", {"hbm_used_mib": [use]}), [job(1000, 1)])[0][1]
    assert row["is_preallocated"] is expected


def test_profiling_counters_at_zero_in_busy_samples_are_a_fault_not_idleness(run: Any) -> None:
    frame = gpus("n1", {"gpu_util_pct": [[90] * 10, [90] * 10], "sm_active_frac": [[0] * 10, [0.5] * 10]})
    jobs, gpu_rows = run(frame, [job(100, 2)])
    assert [row["has_profiling_fault"] for row in gpu_rows] == [True, False]
    assert jobs[1]["has_profiling_fault"] is True
    assert jobs[1]["idle_gpus"] == []


def test_mig_instances_are_judged_by_the_graphics_engine(run: Any) -> None:
    frame = gpus("n1", {"gpu_util_pct": [[0] * 4, [0] * 4], "gr_engine_active_frac": [[0.5] * 4, [0.25] * 4]})
    frame = frame.assign(mig=frame.gpu.astype(str), gpu=0)
    jobs, gpu_rows = run(frame, [job(40, 2)], config=Config(filters=Filters(min_elapsed_s=0)))
    assert [(row["gpu"], row["mig"], row["mean_gpu_util_pct"]) for row in gpu_rows] == [(0, "0", None), (0, "1", None)]
    assert jobs[1]["mean_gpu_util_pct"] is None
    assert jobs[1]["spatial_imbalance"] == 0.25
    assert jobs[1]["verdict"] == "ok"


def slice_of(profile: str | None, **columns: Any) -> pd.DataFrame:
    values = {name: [value if isinstance(value, list) else [value] * 6] for name, value in columns.items()}
    return gpus("n1", values).assign(mig="1", mig_profile=profile, model="NVIDIA A100-SXM4-80GB")


def test_the_use_of_a_slice_is_its_own(run: Any) -> None:
    """GR_ENGINE_ACTIVE counts one engine of a slice, so a full 3g slice shows 1/3 (NVIDIA/DCGM issue 138)."""
    slices: list[tuple[str | None, float, Any, float | None]] = [
        ("7g.80gb", 1 / 7, 0.97, 97),
        ("7g.79gb", 0.97 / 7, None, 97),
        ("3g.40gb", 0.97 / 3, None, 97),
        ("3g.40gb", 1.0, None, 100),  # several compute instances
        ("2g.20gb", 0.4, 0.0, 80),  # a counter at 0 beside a busy engine
        ("1c.3g.40gb", 0.2, [0.5] + [None] * 5, (50 + 5 * 60) / 6),
        (None, 0.25, None, None),
        (None, 0.25, 0.9, 90),
        ("1g.10gb", 0.5, None, 50),
    ]
    frames = [
        slice_of(profile, gr_engine_active_frac=engine, **({} if sm is None else {"sm_active_frac": sm}))
        for profile, engine, sm, _ in slices
    ]
    found = side_by_side(run, [(frame, job(60, 1)) for frame in frames])
    for (profile, _, _, used_pct), (row, gpu_rows) in zip(slices, found, strict=True):
        for shown in (row["mean_gpu_util_pct"], gpu_rows[0]["mean_gpu_util_pct"]):
            assert shown == (used_pct if used_pct is None else pytest.approx(used_pct, rel=1e-5)), profile
        assert row["mig_profile"] == ("7g.80gb" if profile == "7g.79gb" else profile and profile.removeprefix("1c."))


def test_the_memory_of_a_slice_tells_its_size_where_no_profile_does(run: Any) -> None:
    frame = slice_of(None, gr_engine_active_frac=0.97 / 3, hbm_used_mib=1000.0, hbm_total_mib=40_192.0)
    assert run(frame, [job(60, 1)])[0][1]["mean_gpu_util_pct"] == pytest.approx(100)  # 3g and 4g have as much: the most


def test_traffic_of_the_card_is_not_the_slices(run: Any) -> None:
    frame = slice_of("3g.40gb", pcie_tx_bytes_s=1e9, pcie_rx_bytes_s=1e9)
    assert run(frame, [job(60, 1)])[0][1]["pcie_bytes"] is None


def test_an_unlisted_model_is_judged_by_what_is_measured(run: Any) -> None:
    use = [500.0] * 3 + [0.75 * 188_416] * 94 + [500.0] * 3
    total = [188_416.0] * 50 + [300_000.0] + [188_416.0] * 49  # one torn scrape
    frame = gpus("n1", {"hbm_used_mib": [use], "hbm_total_mib": [total]})
    models = ["NVIDIA Rubin", "NVIDIA Z9", "whatever", None]
    found = side_by_side(run, [(frame.assign(model=model), job(1000, 1)) for model in models])
    assert [
        (row["gpu_model"], row["hbm_capacity_mib"], row["is_preallocated"]) for row, _ in found
    ] == [(model, 188_416.0, True) for model in models]  # fmt: skip


FIELDS = ("mfu_frac", "flops_tensor", "mean_sm_clock_mhz")


def test_mfu_is_the_mean_of_activity_times_clock(run: Any) -> None:
    """Half of the time at full clock and all of the pipe, half at a third of it and a tenth of the pipe.

    GPU 0: (1 + 0.1 / 3) / 2 = 0.51666. GPU 1 is idle: the job has half of that. Product of means: 0.55 * 2 / 3 / 2.
    """
    tensor, clock = [1.0, 0.1] * 3, [1410.0, 470.0] * 3
    both = {"tensor_active_frac": [tensor, [0.0] * 6], "sm_clock_mhz": [clock, [210.0] * 6]}
    frame = gpus("n1", {"gpu_util_pct": [[50.0] * 6] * 2, "dram_active_frac": [[0.1] * 6] * 2, **both})
    row = run(frame, [job(60, 2)])[0][1]
    expected = (1 + 0.1 / 3) / 2 / 2
    assert [row[name] for name in FIELDS] == pytest.approx([expected, 2 * expected * 312e12, (940 + 210) / 2], rel=1e-6)
    assert not [reason for reason in row["reasons"] if reason.startswith("mfu_frac")]


def test_mfu_is_by_the_clock_of_the_pipes_peak(run: Any) -> None:
    """H100's tensor peak is that of 1830 MHz, and its FP32 peak that of 1980 MHz."""
    for pipe, expected in (("tensor", 0.25), ("fp32", 0.25 * 1830 / 1980)):
        frame = gpus("n1", {f"{pipe}_active_frac": [[0.25] * 6], "sm_clock_mhz": [[1830.0] * 6]})
        assert run(frame.assign(model="NVIDIA H100 80GB HBM3"), [job(60, 1)])[0][1]["mfu_frac"] == pytest.approx(
            expected
        )


KNOWN, HALF = "NVIDIA A100-SXM4-40GB", [[0.5] * 6]


@pytest.mark.parametrize(
    ("tensor", "clock", "model", "why"),
    [
        (HALF, None, KNOWN, "no SM clock counter"),
        (HALF, [[1000.0, *[None] * 5]], KNOWN, "too few samples"),
        (HALF, [[1000.0] * 6], "whatever", "clock of the peak not known"),
        ([[0.0] * 6], [[1000.0] * 6], KNOWN, "no floating-point pipe used"),
        (None, [[1000.0] * 6], KNOWN, "no main pipe"),
    ],
)
def test_without_a_clock_there_is_no_mfu_and_the_reason_is_given(
    run: Any, tensor: Any, clock: Any, model: str, why: str
) -> None:
    columns = {"tensor_active_frac": tensor, "sm_clock_mhz": clock}
    frame = gpus("n1", {name: values for name, values in columns.items() if values is not None})
    row = run(frame.assign(model=model), [job(60, 1)], config=STRICT)[0][1]
    assert row["mfu_frac"] is None
    assert f"mfu_frac: {why}" in row["reasons"]
    if tensor == HALF:  # as before the clock was read
        assert row["flops_tensor"] == (None if model == "whatever" else 0.5 * 312e12)


def test_mfu_of_a_slice_is_by_the_clock_of_its_card(run: Any) -> None:
    frame = slice_of("3g.40gb", tensor_active_frac=0.5, sm_clock_mhz=705.0)
    row = run(frame, [job(60, 1)])[0][1]
    assert (row["mfu_frac"], row["flops_tensor"]) == (pytest.approx(0.25), None)


def test_of_too_few_samples_only_a_peak_at_no_usual_share_is_surely_a_need(run: Any) -> None:
    for peak_mib, expected in ((0.5 * 40_960, False), (0.75 * 40_960, None)):
        row = run(gpus("n1", {"hbm_used_mib": [[peak_mib, peak_mib]]}), [job(20, 1)])[0][1]
        assert row["is_preallocated"] is expected


def test_one_gpu_of_unknown_capacity_leaves_the_job_unknown(run: Any) -> None:
    frame = gpus("n1", {"hbm_used_mib": [[1000.0] * 6, [2000.0] * 6], "hbm_total_mib": [[80_000.0] * 6, [None] * 6]})
    row = run(frame.assign(model="NVIDIA Rubin"), [job(60, 2)])[0][1]
    assert (row["hbm_peak_mib"], row["hbm_peak_frac"], row["is_preallocated"]) == (2000.0, None, None)


def test_verdicts_and_coverage(run: Any) -> None:
    """1000 s at 10 s are 100 samples. A job keeps its row, whatever sets it aside."""
    busy = gpus("n1", {"gpu_util_pct": [[50.0] * 700], "hbm_used_mib": [[7.0] * 700]})
    hole = busy[(busy.time_ms < (START_S + 4400) * 1000) | (busy.time_ms >= (START_S + 5000) * 1000)].copy()
    hole.loc[hole.time_ms >= (START_S + 5000) * 1000, "gpu_util_pct"] = 0.5
    times = ((1000, 0), (1000, 4000), (1000, 5000), (179, 6000), (500, 8000))
    jobs = [job(length_s, 1, job_id=n, start_s=START_S + at_s) for n, (length_s, at_s) in enumerate(times, 1)]
    jobs += [job(1000, 1, job_id=6, start_s=START_S + 2000, account="staff"),
             job(1000, 1, job_id=7, start_s=START_S + 1000, partition="debug")]  # fmt: skip
    config = Config(filters=Filters(staff_accounts=("staff",), partitions=("", "gpu")))
    found, _ = run(hole, jobs, config=config)
    verdicts = {job_id: row["verdict"] for job_id, row in found.items()}
    assert verdicts == {
        1: "ok", 2: "low coverage", 3: "idle", 4: "short", 5: "no telemetry", 6: "staff", 7: "partition"
    }  # fmt: skip
    assert (found[1]["samples"], found[1]["expected_samples"], found[1]["coverage_frac"]) == (100, 100.0, 1.0)
    assert found[2]["coverage_frac"] == pytest.approx(0.4, rel=1e-12)
    assert found[2]["mean_gpu_util_pct"] is None
    assert found[2]["hbm_peak_mib"] is None
    assert found[3]["hbm_peak_mib"] is None
    assert found[3]["hbm_max_mib"] == 7.0
    assert found[3]["mean_gpu_util_pct"] == 0.5
    assert found[5]["coverage_frac"] == 0.0
    assert found[5]["reasons"] == ["all: no samples"]


def test_a_wrong_label_attributes_nothing_outside_the_jobs_nodes_and_time(run: Any) -> None:
    used = {"n1": [[11] * 40, [22] * 40, [33] * 40, [44] * 40], "n2": [[99] * 40] * 4}
    frame = pd.concat([gpus(host, {"gpu_util_pct": util}) for host, util in used.items()])
    frame["job_label"] = np.where((frame.host == "n2") | (frame.gpu == 1), 1, 0)
    frame.loc[frame.gpu == 3, "job_label"] = np.where(frame.time_ms[frame.gpu == 3] >= (START_S + 200) * 1000, 1, 0)
    found, gpu_rows = run(frame, [job(200, 1)])
    assert [(row["host"], row["gpu"], row["samples"]) for row in gpu_rows] == [("n1", 1, 20)]
    assert found[1]["mean_gpu_util_pct"] == 22.0
    assert found[1]["attributed_by"] == "label"
    ignored = Config(filters=OPEN.filters, bindings=Bindings(use_labels=False))
    assert run(frame, [job(200, 1)], config=ignored)[0][1]["verdict"] == "shared node without GPU binding"


HOLE = [0] * 12 + [None] * 8
"""GPU_UTIL is 0 for 60% of the time, and not known for the rest."""
LATE = [0] * 12 + [0.9] * 8
"""The same GPU's SMs and engine: it worked while GPU_UTIL was not known. The mean is 0.36."""


SEEN: list[tuple[dict[str, Any], str, float, list[int]]] = [
    ({"gpu_util_pct": [[0] * 20]}, "idle", 0, [0]),
    ({"gpu_util_pct": [[0] * 20], "sm_active_frac": [[0] * 20]}, "idle", 0, [0]),
    ({"gpu_util_pct": [HOLE]}, "low coverage", 0, []),
    ({"gpu_util_pct": [HOLE], "sm_active_frac": [LATE]}, "low coverage", 0, []),
    ({"gpu_util_pct": [HOLE], "gr_engine_active_frac": [LATE]}, "ok", 36, []),
    ({"gpu_util_pct": [[0] * 20], "gr_engine_active_frac": [[0.9] * 20]}, "ok", 90, []),
    ({"gpu_util_pct": [[0] * 20], "sm_active_frac": [[0.9] * 20]}, "low coverage", 0, []),
    ({"gpu_util_pct": [[0] * 20, [None] * 20]}, "low coverage", 0, [0]),
    ({"gpu_util_pct": [[0] * 20] * 15 + [HOLE]}, "low coverage", 0, [*range(15)]),
    (  # (10 + 90) / 2: the engine stands in for the GPU without GPU_UTIL, and for no other
        {"gpu_util_pct": [[10] * 20, [None] * 20], "gr_engine_active_frac": [[0.2] * 20, [0.9] * 20]}, "ok", 50, []
    ),
    ({"gpu_util_pct": [[95] * 20, HOLE], "sm_active_frac": [[0.9] * 20, LATE]}, "ok", 47.5, []),
    ({"gpu_util_pct": [[95] * 20, HOLE]}, "ok", 47.5, []),
    ({"gpu_util_pct": [[95] * 20, [0] * 20], "sm_active_frac": [[0.9] * 20, [0] * 20]}, "ok", 47.5, [1]),
]  # fmt: skip
"""Columns, then the data quality, the use in percent, and the idle GPUs."""


def test_only_what_is_known_to_be_idle_is_said_to_be_idle(run: Any) -> None:
    frames = [gpus("n1", columns) for columns, *_ in SEEN]
    found = side_by_side(run, [(frame, job(200, frame.gpu.nunique())) for frame in frames], config=STRICT)
    for number, ((_, data_quality, used_pct, idle), (row, _)) in enumerate(zip(SEEN, found, strict=True)):
        util_pct, engine = row["mean_gpu_util_pct"], row["mean_gr_engine_active_frac"]
        assert (row["verdict"], row["idle_gpus"]) == (data_quality, [f"n{number}:{gpu}" for gpu in idle]), number
        assert (100 * engine if util_pct is None else util_pct) == pytest.approx(used_pct, rel=1e-6), number


def test_a_slice_of_unknown_size_has_no_use_that_could_be_called_low(run: Any) -> None:
    """A full 7g slice shows 1/7: 14%. Its SMs, where they are known, say what it did."""
    frame = slice_of(None, gr_engine_active_frac=1 / 7)
    jobs, gpu_rows = run(frame, [job(60, 1)])
    for row in (jobs[1], gpu_rows[0]):
        assert (row["mean_gr_engine_active_frac"], row["mean_gpu_util_pct"]) == (None, None)
    assert gpu_rows[0]["is_idle"] is False
