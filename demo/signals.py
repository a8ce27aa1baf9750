"""GPU use of each run, and the samples that follow from it. A sample is the same however the span is cut."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import numpy as np
import numpy.typing as npt

from demo.shape import Arrays, Bools, Floats, Ints
from demo.site import FAILED, SitePlan, shown_peak_mib
from demo.users import IDLE
from telemetry.counters import ERRORS

Singles = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint64]
Columns = dict[str, npt.NDArray[np.generic]]

PIPES = ("fp64", "fp32", "fp16", "tensor")
BOUND_MARGIN = 1.35  # keeps a sample on its phase's side of the ridge: 10% noise on two counters is 1.1 / 0.9 = 1.22
_PHASE_SAMPLES = np.uint64(6)
IDLE_W, MOST_W = 55.0, 400.0
_MOST_MHZ, _MHZ_PER_W, _CAP_W = np.float32(1410), np.float32(3), np.float32(300)
"""An A100's clock, and chosen: how it falls above this power."""
_BLOCK_ROWS = 1 << 16  # so that a block's arrays stay in the processor's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_UNUSED_MIB = 3.0
_STIR_SAMPLE, _STIR = 2, np.float32(0.02)  # every GPU that a job uses shows some activity here at the latest


def make_signals(plan: SitePlan) -> Arrays:
    """Numbers of each run that its samples are computed from.

    lead_util: mean utilization of the busiest GPU. excess: how far the other GPUs lie below it on average, in 0..1,
    spread: the relative spread of that. peak: level while active; level_noise: share of it that varies. inv_cycle,
    phase: of the pattern of activity, per sample. *_rate: counter per unit of activity. hbm_*: the curve of memory
    over samples: (k + 1) * ramp, rise + k * slope, each at most 1, and waves of relative depth hbm_wave. held_w: power
    that a GPU in use draws even between its kernels. phase_share: of a run's stretches of _PHASE_SAMPLES, those in
    which its dram_rate is other_dram_rate, on the other side of the ridge.
    """
    rng = np.random.default_rng([plan.shape.seed, 7])
    jobs = plan.jobs.take(plan.runs.job)
    samples = np.maximum(1, (plan.runs.end_s - plan.runs.start_s) // plan.shape.interval_s)
    parts = _activity(plan, jobs, samples, rng) | _rates(plan, jobs, rng) | _memory(plan, jobs, samples, rng)
    parts["key"] = rng.integers(0, 2**63, len(samples)).astype(np.uint64)
    parts |= _unlike(plan, jobs, Arrays(**parts))
    return Arrays(
        **{name: each.astype(np.float32) if each.dtype == np.float64 else each for name, each in parts.items()}
    )


def _activity(plan: SitePlan, jobs: Arrays, samples: Ints, rng: np.random.Generator) -> Columns:
    """Levels, duty and imbalance. The busiest GPU is at position 0, wherever `turn` puts it."""
    number, gpus, util = len(samples), jobs.gpus.astype(float), jobs.util_frac
    one_gpu = plan.families.is_one_gpu[jobs.family]
    excess = np.minimum(np.where(one_gpu, 0.0, jobs.spatial * gpus / (gpus - 1)), 0.95)
    lead = np.where(one_gpu, util * gpus, util / (1 - excess * (gpus - 1) / gpus))
    lead = np.clip(lead, 0.0, 0.985)
    noise = np.minimum(0.15, 2 * (1 - lead))
    peak = np.clip(lead / np.maximum(1e-3, 1 - jobs.temporal), lead / (1 - noise / 2), 1.0)
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


def _rates(plan: SitePlan, jobs: Arrays, rng: np.random.Generator) -> Columns:
    """Counters per unit of activity, alike within a family."""
    family, families = jobs.family, len(plan.families.tier)
    util = np.maximum(jobs.util_frac, 1e-3)
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
    is_busy = jobs.role != IDLE
    nvlink = np.where(plan.families.is_one_gpu[family], 1e4, rng.lognormal(22.5, 1.2, families)[family])
    pcie = rng.lognormal(20.5, 1.0, families)[family]
    both_ways = rng.lognormal(0.0, 0.5, families)[family]
    return {
        **{f"{name}_rate": rate * is_busy for name, rate in pipes.items()}, "sm_rate": sm * is_busy,
        "dram_rate": dram * is_busy, "nvlink_rate": np.minimum(nvlink, 2.5e11),
        "pcie_tx_rate": np.minimum(pcie, 2.4e10), "pcie_rx_rate": np.minimum(pcie * both_ways, 2.4e10),
        "watts": watts, "prof": np.where(jobs.has_prof_fault, 0.0, 1.0),
    }  # fmt: skip


def _unlike(plan: SitePlan, jobs: Arrays, parts: Arrays) -> Columns:
    """Vary jobs of equal utilization by the power of their kernels and by phases across the ridge.

    Draws of its own, so that the other signals do not depend on it.
    """
    rng, noise = np.random.default_rng([plan.shape.seed, 31]), plan.profile.noise
    families, number = len(plan.families.tier), len(jobs.family)
    spread = noise.family_watts_sigma * rng.normal(size=families)[jobs.family]
    spread += noise.job_watts_sigma * rng.normal(size=number)
    held_w = noise.held_most_w * rng.random(families)[jobs.family] * (parts.lead_util > 0)
    watts = np.clip(parts.watts * np.exp(spread), noise.watts_least, MOST_W - IDLE_W - held_w)
    uses_fp64 = np.array(["fp64" in combo.pipes for combo in plan.profile.pipes.combos])[plan.families.combo]
    share = noise.phase_most_share * rng.random(families) * uses_fp64
    ratio = np.where(plan.families.is_compute_bound, BOUND_MARGIN, rng.uniform(0.1, 1 / BOUND_MARGIN, families))
    return {
        "watts": watts, "held_w": held_w, "mean_watts": IDLE_W + held_w + jobs.util_frac * watts,
        "phase_share": share[jobs.family],
        "other_dram_rate": np.minimum(parts.fp64_rate * ratio[jobs.family], 0.97),
    }  # fmt: skip


def _pipe_rate(plan: SitePlan, name: str, util: Floats, family: Ints, rng: np.random.Generator) -> Floats:
    """Mean of the pipe per unit of utilization: above the threshold of use where the combination has it, else below."""
    pipes, families = plan.profile.pipes, len(plan.families.tier)
    has = np.array([name in combo.pipes for combo in pipes.combos])[plan.families.combo[family]]
    used = np.maximum(pipes.used_rate(rng.random(families))[family] * util, pipes.used_least_frac)
    unused = pipes.unused_most_frac * np.maximum(0.0, rng.uniform(-1, 1, families))[family]
    rate: Floats = np.minimum(np.where(has, used, unused) / util, 0.9)
    return rate


def _memory(plan: SitePlan, jobs: Arrays, samples: Ints, rng: np.random.Generator) -> Columns:
    """The curve of memory. Preallocated memory is there from the first sample on; starved jobs climb until they die."""
    held = plan.families.framework[jobs.family] >= 0
    starved = (jobs.need_mib > plan.runs.capacity_mib) & ~held & (plan.runs.state == FAILED)
    kind = rng.choice(3, len(plan.families.tier), p=[0.6, 0.15, 0.25])[jobs.family]
    ramp = np.clip(rng.integers(1, 7, len(samples)), 1, np.maximum(1, samples // 4))
    ramp = np.where(held, 1, np.where(starved, np.maximum(1, samples * 0.9), ramp))
    is_varied = ~held & ~starved & (samples > 12)
    rises = (kind == 1) & is_varied
    return {
        "hbm_mib": np.where(jobs.role == IDLE, 3.0, shown_peak_mib(plan)), "hbm_equal": held, "hbm_ramp": 1 / ramp,
        "hbm_rise": np.where(rises, 0.5, 1.0), "hbm_slope": np.where(rises, 0.5 / (0.85 * samples), 0.0),
        "hbm_wave": np.where((kind == 2) & is_varied, 0.2, 0.0),
    }  # fmt: skip


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): well-spread 64 bits for each input."""
    words = (words ^ (words >> np.uint64(30))) * _MIX[0]
    words = (words ^ (words >> np.uint64(27))) * _MIX[1]
    return words ^ (words >> np.uint64(31))


def _uniform4(words: Words) -> Singles:
    """Four numbers of 0..1 for each word: (4, n)."""
    return words.view(np.uint16).reshape(-1, 4).T.astype(np.float32) * np.float32(2**-16)


def sample_columns(signals: Arrays, idle_watts: Singles, stretches: Arrays, wanted: Set[str]) -> Columns:
    """The wanted counters of the samples of the stretches, in their order, with power_w always among them.

    idle_watts: per (node, gpu). stretches: samples of one GPU in one run each, in order of host, GPU and time. place:
    the GPU's number within its job; first_sample: number within the run of the first sample; length: of samples.
    """
    edges = np.concatenate([[0], np.cumsum(stretches.length)])
    out: Columns = {}
    begin = 0
    while begin < len(stretches.length):
        end = max(begin + 1, int(np.searchsorted(edges, edges[begin] + _BLOCK_ROWS, side="right")) - 1)
        part = stretches.take(slice(begin, end))
        for name, values in _Block(signals, idle_watts, part, wanted).columns().items():
            out.setdefault(name, np.empty(int(edges[-1]), dtype=values.dtype))[edges[begin] : edges[end]] = values
        begin = end
    return out


class _Block:
    """The samples of some stretches. run: numbers of their runs, of: the stretch of each sample, k: its number."""

    def __init__(self, signals: Arrays, idle_watts: Singles, part: Arrays, wanted: Set[str]) -> None:
        self._wanted, self._of = wanted, np.repeat(np.arange(len(part.length)), part.length)
        self._s = signals.take(part.run)
        self._position = (part.place + self._s.turn) % self._s.gpus.astype(np.int64)
        self._weight = self._weights()
        starts = np.cumsum(part.length) - part.length
        sample = np.arange(len(self._of)) - np.repeat(starts - part.first_sample, part.length)
        self._key = mix(self._s.key + part.place.astype(np.uint64) * _GOLDEN)
        self._noise = _uniform4(mix(self._key[self._of] + sample.astype(np.uint64) * _GOLDEN))
        self._k = sample.astype(np.float32)
        self._idle_w = idle_watts[part.node, part.gpu]

    def columns(self) -> Columns:
        active = self._active()
        idle_w = self._idle_w + self._s.held_w * (self._weight > 0)
        power = idle_w[self._of] + active * self._s.watts[self._of] * (0.97 + 0.06 * self._noise[1])
        power = np.minimum(power, np.float32(MOST_W))
        columns: Columns = {"power_w": power}
        if self._wanted:
            columns |= self._profiling(active) | self._device(active, power)
        return {name: values for name, values in columns.items() if name == "power_w" or name in self._wanted}

    def _weights(self) -> Singles:
        """Duty of each GPU relative to the busiest, which is at position 0; their mean makes the spatial imbalance."""
        s = self._s
        rank = (self._position - 0.5) / np.maximum(s.gpus - 1, 1)
        below = s.excess * (1 + s.spread * (2 * rank - 1))
        weight = np.where(self._position == 0, 1.0, np.where(s.is_one_gpu, 0.0, 1 - below))
        weights: Singles = (weight * (s.lead_util > 0)).astype(np.float32)
        return weights

    def _active(self) -> Singles:
        """Activity in 0..1. A GPU that works less than the busiest does so in both: how often, and how strongly."""
        s, of, root = self._s, self._of, np.sqrt(self._weight)
        level = s.peak * root
        duty = s.lead_util * root / np.maximum(s.peak * (1 - s.level_noise / 2), 1e-6)
        turns = (self._k + s.phase[of]) * s.inv_cycle[of]
        is_on = (turns - np.floor(turns)) < duty[of]
        active: Singles = is_on * level[of] * (1 - s.level_noise[of] * self._noise[0])
        active[(self._k == _STIR_SAMPLE) & (self._weight > 0)[of] & ~is_on] = _STIR
        return active

    def _profiling(self, active: Singles) -> Columns:
        """The PROF counters: 0 all along in a run whose profiling failed."""
        s, of, most = self._s, self._of, np.float32(0.999)
        true = active * s.prof[of]
        near, far, third = (0.9 + 0.2 * self._noise[n] for n in (1, 2, 3))
        waves = {"sm": near, "fp64": near, "dram": far, "fp32": third, "fp16": far, "tensor": third}
        shares: dict[str, Any] = {"gr_engine_active_frac": true * third}
        rates = {name: vars(s)[f"{name}_rate"][of] for name in waves if f"{name}_active_frac" in self._wanted}
        if "dram" in rates:
            rates["dram"] = np.where(self._is_other_phase(), s.other_dram_rate[of], rates["dram"])
        shares |= {f"{name}_active_frac": true * rate * waves[name] for name, rate in rates.items()}
        links = {
            "nvlink_tx": (s.nvlink_rate, near), "nvlink_rx": (s.nvlink_rate, near * (0.98 + 0.02 * far)),
            "pcie_tx": (s.pcie_tx_rate, far), "pcie_rx": (s.pcie_rx_rate, third),
        }  # fmt: skip
        bytes_s = {
            f"{name}_bytes_s": np.rint(true * rate[of] * wave).astype(np.float64)
            for name, (rate, wave) in links.items()
            if f"{name}_bytes_s" in self._wanted
        }
        return {name: np.minimum(values, most) for name, values in shares.items()} | bytes_s

    def _is_other_phase(self) -> Bools:
        """The same on all GPUs of a run."""
        stretch = (self._k.astype(np.uint64) // _PHASE_SAMPLES) * _GOLDEN
        is_other: Bools = _uniform4(mix(self._s.key[self._of] ^ stretch))[0] < self._s.phase_share[self._of]
        return is_other

    def _device(self, active: Singles, power: Singles) -> Columns:
        """The counters that need no profiling module."""
        s, of, k, noise = self._s, self._of, self._k, self._noise[3]
        curve = np.minimum((k + 1) * s.hbm_ramp[of], np.float32(1))
        curve *= np.minimum(s.hbm_rise[of] + k * s.hbm_slope[of], np.float32(1))
        curve *= 1 - s.hbm_wave[of] * noise * (np.mod(k, np.float32(5)) > 0)
        return {
            "gpu_util_pct": np.rint(active * 100),
            "hbm_used_mib": np.rint(np.maximum(self._held_mib()[of] * curve, _UNUSED_MIB)),
            "temp_c": np.rint(24 + 0.05 * power + 0.05 * np.maximum(s.mean_watts, IDLE_W)[of]),
            "sm_clock_mhz": np.rint(_MOST_MHZ - _MHZ_PER_W * np.maximum(power - _CAP_W, 0)),
            **{name: np.zeros(len(k), np.float32) for name in ERRORS},
        }

    def _held_mib(self) -> Singles:
        """Memory of each GPU when its curve is at 1: the busiest holds the job's peak, unused ones next to nothing."""
        s, is_lead = self._s, self._position == 0
        part = np.where(is_lead | s.hbm_equal, np.float32(1), 0.9 + 0.1 * _uniform4(self._key)[2])
        is_used = (self._weight > 0) | is_lead | s.hbm_equal
        held: Singles = np.where(is_used, s.hbm_mib * part, _UNUSED_MIB).astype(np.float32)
        return held
