"""The job metrics once more, written from docs/formulas.md in plain loops: no code in common with the engine.

A frame holds telemetry rows (pandas, NaN for missing). A job is (start_s, end_s, units), units being (host, gpu, mig).
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pandas as pd

PIPES = ("fp64", "fp32", "fp16", "tensor")
PEAKS = {"fp64": 9.7e12, "fp32": 19.5e12, "fp16": 78e12, "tensor": 312e12}
BANDWIDTH, CAPACITY_MIB, CLOCK_MHZ = 1.555e12, 40960.0, 1410.0
MEANS = (
    "gpu_util_pct", "hbm_used_mib", "gr_engine_active_frac", "sm_active_frac", "fp64_active_frac", "fp32_active_frac",
    "fp16_active_frac", "tensor_active_frac", "dram_active_frac", "power_w", "temp_c", "nvlink_tx_bytes_s",
    "nvlink_rx_bytes_s", "pcie_tx_bytes_s", "pcie_rx_bytes_s", "sm_clock_mhz",
)  # fmt: skip


def samples_of(frame: pd.DataFrame, unit: tuple[str, int, str], start_s: int, end_s: int) -> pd.DataFrame:
    """One GPU's samples in [start_s, end_s), in time order, each once."""
    host, gpu, mig = unit
    mine = frame[(frame.host == host) & (frame.gpu == gpu) & (frame.mig == mig)]
    mine = mine[(mine.time_ms >= start_s * 1000) & (mine.time_ms < end_s * 1000)]
    return mine.sort_values("time_ms").drop_duplicates("time_ms")


def mean(values: Any) -> float:
    known = np.asarray(values, float)
    known = known[~np.isnan(known)]
    return math.fsum(known) / len(known) if len(known) else math.nan


def weights(times_ms: list[int], interval_ms: float) -> list[float]:
    """The time that each sample of one GPU stands for, hour by hour of the clock."""
    found: list[float] = []
    for _, hour in itertools.groupby(times_ms, key=lambda time_ms: time_ms // 3_600_000):
        times = list(hour)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        if not gaps:
            found.append(interval_ms)
            continue
        beside = [max([0, *gaps[:n][-1:], *gaps[n + 1 :][:1]]) for n in range(len(gaps))]
        bounded = [min(gap, 2 * longest) if longest else gap for gap, longest in zip(gaps, beside, strict=True)]
        of_hour = [
            interval_ms if interval_ms / 1.1 <= gap <= interval_ms * 1.1 else ms
            for gap, ms in zip(gaps, bounded, strict=True)
        ]
        found += [*of_hour, of_hour[-1]]
    return found


def weighted_mean(values: Any, weight: list[float]) -> float:
    pairs = [(value, w) for value, w in zip(values, weight, strict=True) if not math.isnan(value)]
    return math.fsum(value * w for value, w in pairs) / math.fsum(w for _, w in pairs) if pairs else math.nan


def temporal_imbalance(activity: np.ndarray, weight: list[float]) -> float:
    known = activity[~np.isnan(activity)]
    if not len(known):
        return math.nan
    if known.max() == 0:
        return 0.0
    return min(1.0, max(0.0, 1 - weighted_mean(activity, weight) / known.max()))


def is_idle(part: pd.DataFrame, weight: list[float]) -> bool:
    """Of a GPU without long holes. Its SMs and its engine must not say otherwise than GPU_UTIL."""
    others = [weighted_mean(part[f"{name}_active_frac"], weight) for name in ("sm", "gr_engine")]
    return bool(part.gpu_util_pct.max() == 0) and not any(other >= 0.01 for other in others)


def energy_j(part: pd.DataFrame, start_s: int, end_s: int) -> tuple[float, float, int]:
    """Energy of the job on one GPU, seconds between its first and last reading, resets. The counter has no fault."""
    known = part[~part.energy_mj.isna()]
    if len(known) < 2:
        return math.nan, math.nan, 0
    total, resets = 0.0, 0
    for before, after in itertools.pairwise(known.energy_mj.to_numpy(float)):
        if after < before:
            resets += 1
            total += after / 1000
        else:
            total += (after - before) / 1000
    first, last = known.iloc[0], known.iloc[-1]
    measured_s = (last.time_ms - first.time_ms) / 1000
    mean_w = total / measured_s
    for gap_ms, watts in ((first.time_ms - start_s * 1000, first.power_w), (end_s * 1000 - last.time_ms, last.power_w)):
        near_ms = min(gap_ms, 60_000)
        total += (near_ms * (mean_w if math.isnan(watts) else float(watts)) + (gap_ms - near_ms) * mean_w) / 1000
    return total, measured_s, resets


def growth(hours: np.ndarray, mib: np.ndarray) -> float:
    known = ~np.isnan(mib)
    if known.sum() < 2:
        return math.nan
    x, y = hours[known], mib[known]
    x = x - x.mean()
    return math.fsum(x * (y - y.mean())) / math.fsum(x * x)


def classes(mine: pd.DataFrame) -> dict[str, tuple[int, int, int, int]]:
    """Per pipe: ms right of the ridge, ms placed, samples right of the ridge, samples placed."""
    placed = []
    for row in mine.to_dict("records"):
        fractions = [row[f"{pipe}_active_frac"] for pipe in PIPES]
        known = [f for f in fractions if not math.isnan(f)]
        dram = row["dram_active_frac"]
        if math.isnan(dram) or dram > 1 or any(f > 1 for f in known) or not any(f > 0 for f in known):
            continue
        placed.append((row["time_ms"], fractions, dram))
    found = {}
    for number, pipe in enumerate(PIPES):
        compute_ms = placed_ms = compute = number_placed = 0
        for place, (time_ms, fractions, dram) in enumerate(placed):
            if math.isnan(fractions[number]):
                continue
            weight = placed[place + 1][0] - time_ms if place + 1 < len(placed) else 0
            right = dram == 0 or fractions[number] > dram
            number_placed += 1
            placed_ms += weight
            compute += right
            compute_ms += weight * right
        found[pipe] = (compute_ms, placed_ms, compute, number_placed)
    return found


def intensity_bins(mine: pd.DataFrame, pipe: str) -> np.ndarray:
    counts = np.zeros(32, int)
    for row in mine.to_dict("records"):
        fractions = [row[f"{p}_active_frac"] for p in PIPES]
        known = [f for f in fractions if not math.isnan(f)]
        active, dram = row[f"{pipe}_active_frac"], row["dram_active_frac"]
        if math.isnan(dram) or dram > 1 or any(f > 1 for f in known) or math.isnan(active) or active <= 0 or dram <= 0:
            continue
        intensity = active * PEAKS[pipe] / (dram * BANDWIDTH)
        counts[1 + min(30, max(-1, math.floor((math.log10(intensity) + 3) * 5)))] += 1
    return counts


def spatial_imbalance(activity: list[tuple[np.ndarray, np.ndarray]], width_ms: int) -> float:
    """activity: times and values of each GPU. Windows of width_ms, by the means of their GPUs."""
    gpus = len(activity)
    if gpus < 2:
        return math.nan
    windows: dict[int, dict[int, list[float]]] = {}
    for number, (times, values) in enumerate(activity):
        for time_ms, value in zip(times, values, strict=True):
            if not math.isnan(value):
                windows.setdefault(time_ms // width_ms, {}).setdefault(number, []).append(value)
    means = [[mean(values) for values in window.values()] for window in windows.values() if 2 * len(window) > gpus]
    if not means or all(max(window) == 0 for window in means):
        return math.nan
    return mean([1 - math.fsum(window) / (len(window) * max(window)) if max(window) > 0 else 0.0 for window in means])


def papers_spatial_imbalance(activity: list[tuple[np.ndarray, np.ndarray]], width_ms: int) -> float:
    """The same by the sums of the GPUs."""
    gpus = len(activity)
    if gpus < 2:
        return math.nan
    windows: dict[int, list[float]] = {}
    for number, (times, values) in enumerate(activity):
        for time_ms, value in zip(times, values, strict=True):
            if not math.isnan(value):
                totals = windows.setdefault(time_ms // width_ms, [0.0] * gpus)
                totals[number] += value
    each = [1 - math.fsum(totals) / (gpus * max(totals)) if max(totals) > 0 else 0.0 for totals in windows.values()]
    if not each or all(max(totals) == 0 for totals in windows.values()):
        return math.nan
    return math.fsum(each) / len(each)


def job_metrics(
    frame: pd.DataFrame,
    start_s: int,
    end_s: int,
    units: list[tuple[str, int, str]],
    intervals_ms: dict[tuple[str, int, str], float] | None = None,
) -> dict[str, Any]:
    """Every metric of a job on A100-40, for any coverage; NaN without data.

    intervals_ms: the scrape interval of each GPU, by default 10 s.
    """
    parts = [samples_of(frame, unit, start_s, end_s) for unit in units]
    seen = [(unit, part) for unit, part in zip(units, parts, strict=True) if len(part)]
    found: dict[str, Any] = {"samples": sum(len(part) for _, part in seen), "gpus_seen": len(seen)}
    expected = [(end_s - start_s) * 1000 / (intervals_ms or {}).get(unit, 10_000.0) for unit in units]
    found["coverage_frac"] = mean([min(1.0, len(part) / number) for part, number in zip(parts, expected, strict=True)])
    weight = [weights(part.time_ms.tolist(), (intervals_ms or {}).get(unit, 10_000.0)) for unit, part in seen]
    for counter in MEANS:
        found[f"mean_{counter}"] = mean(
            [weighted_mean(part[counter], its) for (_, part), its in zip(seen, weight, strict=True)]
        )
    util = [(part.time_ms.to_numpy(), part.gpu_util_pct.to_numpy(float)) for _, part in seen]
    found["spatial_imbalance"] = spatial_imbalance(util, 60_000)
    found["temporal_imbalance"] = np.nanmax(
        [temporal_imbalance(values, its) for (_, values), its in zip(util, weight, strict=True)]
    )
    found["idle_gpus"] = [
        f"{unit[0]}:{unit[1]}" for (unit, part), its in zip(seen, weight, strict=True) if is_idle(part, its)
    ]
    _energy(found, seen, start_s, end_s)
    _memory(found, seen, start_s)
    _roofline(found, seen, weight)
    return found


def _energy(found: dict[str, Any], seen: list[Any], start_s: int, end_s: int) -> None:
    parts = [energy_j(part, start_s, end_s) for _, part in seen]
    energies = [joule for joule, _, _ in parts if not math.isnan(joule)]
    found["energy_j"] = math.fsum(energies) if energies else math.nan
    found["energy_power_w"] = mean(energies) / (end_s - start_s)
    measured_s = math.fsum(measured for _, measured, _ in parts if not math.isnan(measured))
    found["energy_measured_frac"] = measured_s / (end_s - start_s) / len(seen) if energies else math.nan
    found["energy_resets"] = sum(resets for _, _, resets in parts)
    found["energy_rejected"] = 0


def _memory(found: dict[str, Any], seen: list[Any], start_s: int) -> None:
    peaks = [part.hbm_used_mib.max() for _, part in seen]
    found["hbm_max_mib"] = np.nanmax(peaks)
    times = [
        part[part.hbm_used_mib == found["hbm_max_mib"]].time_ms.min()
        for (_, part), peak in zip(seen, peaks, strict=True)
        if peak == found["hbm_max_mib"]
    ]
    found["hbm_peak_ms"] = min(times)
    found["hbm_growth_mib_h"] = np.nanmax(
        [
            growth((part.time_ms.to_numpy() - start_s * 1000) / 3.6e6, part.hbm_used_mib.to_numpy(float))
            for _, part in seen
        ]
    )


def _roofline(found: dict[str, Any], seen: list[Any], weight: list[list[float]]) -> None:
    def means(counter: str) -> list[float]:
        return [weighted_mean(part[counter], its) for (_, part), its in zip(seen, weight, strict=True)]

    per_gpu = [classes(part) for _, part in seen]
    reached = {
        pipe: [
            weighted_mean(part[f"{pipe}_active_frac"].astype(float) * part.sm_clock_mhz / CLOCK_MHZ, its)
            for (_, part), its in zip(seen, weight, strict=True)
        ]
        for pipe in PIPES
    }
    main = max(PIPES, key=lambda pipe: found[f"mean_{pipe}_active_frac"])
    found["mfu_frac"] = mean(reached[main])
    moved = math.fsum(active * BANDWIDTH for active in means("dram_active_frac"))
    found["hbm_bytes_s"] = moved
    for pipe in PIPES:
        compute_ms, placed_ms, compute, placed = np.sum([counts[pipe] for counts in per_gpu], axis=0)
        found[f"compute_frac_{pipe}"] = compute_ms / placed_ms if placed_ms else math.nan
        found[f"compute_sample_frac_{pipe}"] = compute / placed if placed else math.nan
        found[f"placed_samples_{pipe}"] = placed or math.nan
        found[f"class_{pipe}"] = None if not placed_ms else "compute" if 2 * compute_ms > placed_ms else "memory"
        # Without a clock, as if it were that of the peak.
        active = zip(reached[pipe], means(f"{pipe}_active_frac"), strict=True)
        found[f"flops_{pipe}"] = math.fsum(PEAKS[pipe] * (any_clock if math.isnan(a) else a) for a, any_clock in active)
        found[f"intensity_{pipe}"] = found[f"flops_{pipe}"] / moved
        found[f"intensity_bins_{pipe}"] = np.sum([intensity_bins(part, pipe) for _, part in seen], axis=0).tolist()
