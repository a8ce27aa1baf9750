"""How each run uses its GPUs, as numbers that the rows of telemetry are computed from."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from demo.jobs import FAILED
from demo.plan import SitePlan, shown_peak_mib
from demo.population import IDLE
from demo.profile import PIPES, Bools, Floats, Ints

Singles = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]

BOUND_MARGIN = 1.35  # keeps every sample on its job's side of the ridge: 10% noise on two counters is 1.1 / 0.9 = 1.22
IDLE_W, MOST_W = 55.0, 400.0


@dataclass(frozen=True)
class Signals:
    """Parallel arrays over runs, and one last entry for a GPU without a job.

    lead_util: mean utilization of the busiest GPU. excess: how far the other GPUs lie below it on average, in 0..1,
    spread: the relative spread of that. peak: level while active; level_noise: share of it that varies. inv_cycle,
    phase: of the pattern of activity, per sample. *_rate: counter per unit of activity. hbm_*: the curve of memory
    over samples: (k + 1) * ramp, rise + k * slope, each at most 1, and waves of relative depth hbm_wave.
    """

    key: Words
    gpus: Singles
    lead_util: Singles
    excess: Singles
    spread: Singles
    is_one_gpu: Bools
    turn: Ints
    peak: Singles
    level_noise: Singles
    inv_cycle: Singles
    phase: Singles
    sm_rate: Singles
    fp64_rate: Singles
    fp32_rate: Singles
    fp16_rate: Singles
    tensor_rate: Singles
    dram_rate: Singles
    nvlink_rate: Singles
    pcie_tx_rate: Singles
    pcie_rx_rate: Singles
    watts: Singles
    mean_watts: Singles
    prof: Singles
    hbm_mib: Singles
    hbm_equal: Bools
    hbm_ramp: Singles
    hbm_rise: Singles
    hbm_slope: Singles
    hbm_wave: Singles
    capacity_mib: Singles


def make_signals(plan: SitePlan) -> Signals:
    """The signals of every run of the plan."""
    rng = np.random.default_rng([plan.shape.seed, 7])
    job = plan.runs.job
    family = plan.jobs.family[job]
    parts: dict[str, npt.NDArray[np.generic]] = {}
    parts |= _activity(plan, job, family, rng)
    parts |= _rates(plan, job, family, rng)
    parts |= _memory(plan, job, family, rng)
    parts["key"] = rng.integers(0, 2**63, len(job)).astype(np.uint64)
    return Signals(**{f.name: _with_idle(parts[f.name]) for f in fields(Signals)})  # type: ignore[arg-type]


def _with_idle(values: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """The array and a last 0 (no activity, no memory), floats as float32."""
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return np.concatenate([values, np.zeros(1, dtype=values.dtype)])


def _activity(plan: SitePlan, job: Ints, family: Ints, rng: np.random.Generator) -> dict[str, npt.NDArray[np.generic]]:
    """Levels, duty and imbalance. The busiest GPU is at position 0, wherever `turn` puts it."""
    jobs, number = plan.jobs, len(job)
    gpus = jobs.gpus[job].astype(float)
    util, temporal = jobs.util_frac[job], jobs.temporal[job]
    one_gpu = plan.families.is_one_gpu[family] & (gpus > 1)
    spatial = np.where(gpus > 1, jobs.spatial[job], 0.0)
    excess = np.where(one_gpu | (gpus <= 1), 0.0, spatial * gpus / np.maximum(gpus - 1, 1))
    excess = np.minimum(excess, 0.95)
    lead = np.where(one_gpu, util * gpus, util / (1 - excess * (gpus - 1) / gpus))
    lead = np.clip(lead, 0.0, 0.985)
    noise = np.minimum(0.15, 2 * (1 - lead))
    peak = np.clip(lead / np.maximum(1e-3, 1 - temporal), lead / (1 - noise / 2), 1.0)
    samples = np.maximum(1, (plan.runs.end_s - plan.runs.start_s) // plan.shape.interval_s)
    long_cycle = np.minimum(rng.lognormal(3.2, 0.7, number), samples / 8)
    is_long = (rng.random(number) < 0.3) & (long_cycle > 4)
    cycle = np.where(is_long, long_cycle, rng.uniform(2.1, 3.9, number))
    return {
        "gpus": gpus, "lead_util": lead, "excess": excess,
        "spread": np.minimum(0.5, np.where(excess > 0, 0.97 / np.maximum(excess, 1e-9) - 1, 0.5)),
        "is_one_gpu": one_gpu, "turn": rng.integers(0, 4, number),
        "peak": np.where(util > 0, np.maximum(peak, 0.012), 0.0),
        "level_noise": noise, "inv_cycle": 1 / cycle, "phase": rng.uniform(0, 50, number),
    }  # fmt: skip


def _rates(plan: SitePlan, job: Ints, family: Ints, rng: np.random.Generator) -> dict[str, npt.NDArray[np.generic]]:
    """Counters per unit of activity, alike within a family."""
    util = np.maximum(plan.jobs.util_frac[job], 1e-3)
    families = len(plan.families.tier)
    compute = plan.families.is_compute_bound[family]
    pipes = {name: _pipe_rate(plan, name, util, family, rng) for name in PIPES}
    pipes["fp64"] = np.minimum(pipes["fp64"], np.where(compute, 0.9, 0.68))
    wide = BOUND_MARGIN + rng.exponential(1.5, families)[family]
    traffic = np.maximum(pipes["fp64"] * wide, rng.uniform(0.03, 0.6, families)[family])
    narrow = rng.uniform(0.0, 1 / BOUND_MARGIN, families)[family]
    dram = np.where(compute, pipes["fp64"] * np.where(narrow < 0.07, 0.0, narrow), np.minimum(traffic, 0.97))
    busiest = np.max([*pipes.values(), dram], axis=0)
    sm = np.clip(np.maximum(rng.uniform(0.3, 0.95, families)[family], busiest * 1.02), 0, 0.98)
    watts = 70 + 110 * sm + 130 * dram + 70 * pipes["tensor"] + 60 * pipes["fp64"]
    is_busy = plan.jobs.role[job] != IDLE
    several = plan.jobs.gpus[job] > 1
    nvlink = np.where(several & ~plan.families.is_one_gpu[family], rng.lognormal(22.5, 1.2, families)[family], 1e4)
    pcie = rng.lognormal(20.5, 1.0, families)[family]
    both_ways = rng.lognormal(0.0, 0.5, families)[family]
    return {
        **{f"{name}_rate": rate * is_busy for name, rate in pipes.items()}, "sm_rate": sm * is_busy,
        "dram_rate": dram * is_busy, "nvlink_rate": np.minimum(nvlink, 2.5e11),
        "pcie_tx_rate": np.minimum(pcie, 2.4e10), "pcie_rx_rate": np.minimum(pcie * both_ways, 2.4e10),
        "watts": np.minimum(watts, MOST_W - IDLE_W),
        "mean_watts": IDLE_W + plan.jobs.util_frac[job] * np.minimum(watts, MOST_W - IDLE_W),
        "prof": np.where(plan.jobs.has_prof_fault[job], 0.0, 1.0),
    }  # fmt: skip


def _pipe_rate(plan: SitePlan, name: str, util: Floats, family: Ints, rng: np.random.Generator) -> Floats:
    """Mean of the pipe per unit of utilization: above the threshold of use where the combination has it, else below."""
    pipes, families = plan.profile.pipes, len(plan.families.tier)
    has = np.array([name in combo.pipes for combo in pipes.combos])[plan.families.combo[family]]
    used = np.maximum(pipes.used_rate(rng.random(families))[family] * util, pipes.used_least_frac)
    unused = pipes.unused_most_frac * np.maximum(0.0, rng.uniform(-1, 1, families))[family]
    rate: Floats = np.minimum(np.where(has, used, unused) / util, 0.9)
    return rate


def _memory(plan: SitePlan, job: Ints, family: Ints, rng: np.random.Generator) -> dict[str, npt.NDArray[np.generic]]:
    """The curve of memory. Preallocated memory is there from the first sample on; starved jobs climb until they die."""
    runs, number = plan.runs, len(job)
    samples = np.maximum(1, (runs.end_s - runs.start_s) // plan.shape.interval_s).astype(float)
    held = plan.families.framework[family] >= 0
    starved = (plan.jobs.need_mib[job] > runs.capacity_mib) & ~held & (runs.state == FAILED)
    kind = rng.choice(3, len(plan.families.tier), p=[0.6, 0.15, 0.25])[family]
    ramp = np.clip(rng.integers(1, 7, number), 1, np.maximum(1, samples // 4))
    ramp = np.where(held, 1, np.where(starved, np.maximum(1, samples * 0.9), ramp))
    rises = (kind == 1) & ~held & ~starved & (samples > 12)
    waves = (kind == 2) & ~held & ~starved & (samples > 12)
    idle = plan.jobs.role[job] == IDLE
    return {
        "hbm_mib": np.where(idle, 3.0, shown_peak_mib(plan)), "hbm_equal": held, "hbm_ramp": 1 / ramp,
        "hbm_rise": np.where(rises, 0.5, 1.0), "hbm_slope": np.where(rises, 0.5 / (0.85 * samples), 0.0),
        "hbm_wave": np.where(waves, 0.2, 0.0), "capacity_mib": runs.capacity_mib,
    }  # fmt: skip
