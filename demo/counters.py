"""Rows of telemetry from the signals: the same numbers for a sample however the span is cut."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from demo.profile import Ints
from demo.signals import IDLE_W, Signals, Singles, Words

BLOCK_ROWS = 1 << 16  # so that a block's arrays stay in the processor's cache
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_UNUSED_MIB = 3.0
_STIR_SAMPLE, _STIR = 2, np.float32(0.02)  # every GPU that a job uses shows some activity here at the latest


@dataclass(frozen=True)
class Segments:
    """Stretches of samples of one GPU in one run: parallel arrays, in order of host, GPU and time.

    place: the GPU's number within its job. first_sample: number within the run of the first sample of the stretch.
    gap_ticks: samples before the run during which the GPU was nobody's.
    """

    run: Ints
    node: Ints
    gpu: Ints
    place: Ints
    first_tick: Ints
    first_sample: Ints
    length: Ints
    gap_ticks: Ints


def mix(words: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): well-spread 64 bits for each input."""
    words = (words ^ (words >> np.uint64(30))) * _MIX[0]
    words = (words ^ (words >> np.uint64(27))) * _MIX[1]
    return words ^ (words >> np.uint64(31))


def _uniform4(words: Words) -> npt.NDArray[np.uint16]:
    """Four 16-bit numbers for each word: (4, n)."""
    return words.view(np.uint16).reshape(-1, 4).T


def _unit(halves: npt.NDArray[np.uint16]) -> Singles:
    return halves.astype(np.float32) * np.float32(2**-16)


class RowMaker:
    """Computes the columns of blocks of segments."""

    def __init__(self, signals: Signals, idle_watts: Singles, wanted: Set[str]) -> None:
        """idle_watts: per (node, gpu). wanted: the counter columns to compute; power comes in any case."""
        self._signals = signals
        self._idle_watts = idle_watts
        self._wanted = wanted

    def columns(self, segments: Segments) -> dict[str, npt.NDArray[np.generic]]:
        """Every wanted column of the segments' samples, in their order, with power_w always among them."""
        edges = np.concatenate([[0], np.cumsum(segments.length)])
        out: dict[str, npt.NDArray[np.generic]] = {}
        begin = 0
        while begin < len(segments.length):
            end = max(begin + 1, int(np.searchsorted(edges, edges[begin] + BLOCK_ROWS, side="right")) - 1)
            for name, values in self._block(segments, begin, end).items():
                if name not in out:
                    out[name] = np.empty(int(edges[-1]), dtype=values.dtype)
                out[name][edges[begin] : edges[end]] = values
            begin = end
        return out

    def _block(self, segments: Segments, begin: int, end: int) -> dict[str, npt.NDArray[np.generic]]:
        part = slice(begin, end)
        s, run, length = self._signals, segments.run[part], segments.length[part]
        place = segments.place[part]
        position = (place + s.turn[run]) % np.maximum(s.gpus[run].astype(np.int64), 1)
        weight = _weights(s, run, position)
        of = np.repeat(np.arange(end - begin), length)
        starts = np.cumsum(length) - length
        sample = np.arange(len(of)) - np.repeat(starts - segments.first_sample[part], length)
        key = mix(s.key[run] + place.astype(np.uint64) * _GOLDEN)
        noise = _uniform4(mix(key[of] + sample.astype(np.uint64) * _GOLDEN))
        k = sample.astype(np.float32)
        active = self._active(run, weight, of, k, _unit(noise[0]))
        idle_w = self._idle_watts[segments.node[part], segments.gpu[part]]
        power = idle_w[of] + active * s.watts[run][of] * (0.97 + 0.06 * _unit(noise[1]))
        columns: dict[str, npt.NDArray[np.generic]] = {"power_w": power}
        if self._wanted:
            columns |= self._profiling(run, of, active, noise)
            held_mib = _held_mib(s, run, position, weight, key)
            columns |= self._device(run, held_mib, of, k, active, power, _unit(noise[3]))
        return columns

    def _active(self, run: Ints, weight: Singles, of: Ints, k: Singles, noise: Singles) -> Singles:
        """Activity in 0..1. A GPU that works less than the busiest does so in both: how often, and how strongly."""
        s = self._signals
        root = np.sqrt(weight)
        level = s.peak[run] * root
        duty = s.lead_util[run] * root / np.maximum(s.peak[run] * (1 - s.level_noise[run] / 2), 1e-6)
        turns = (k + s.phase[run][of]) * s.inv_cycle[run][of]
        is_on = (turns - np.floor(turns)) < duty[of]
        active: Singles = is_on * level[of] * (1 - s.level_noise[run][of] * noise)
        active[(k == _STIR_SAMPLE) & (weight > 0)[of] & ~is_on] = _STIR
        return active

    def _profiling(
        self, run: Ints, of: Ints, active: Singles, noise: npt.NDArray[np.uint16]
    ) -> dict[str, npt.NDArray[np.generic]]:
        """The PROF counters: 0 all along in a run whose profiling failed."""
        s, most = self._signals, np.float32(0.999)
        true = active * s.prof[run][of]
        near, far, third = (0.9 + 0.2 * _unit(noise[n]) for n in (1, 2, 3))
        plain = {
            "gr_engine_active_frac": (None, third), "sm_active_frac": (s.sm_rate, near),
            "fp64_active_frac": (s.fp64_rate, near), "dram_active_frac": (s.dram_rate, far),
            "fp32_active_frac": (s.fp32_rate, third), "fp16_active_frac": (s.fp16_rate, far),
            "tensor_active_frac": (s.tensor_rate, third),
        }  # fmt: skip
        columns: dict[str, npt.NDArray[np.generic]] = {}
        for name, (rate, wave) in plain.items():
            if name in self._wanted:
                columns[name] = np.minimum(true * wave if rate is None else true * rate[run][of] * wave, most)
        rates = {
            "nvlink_tx_bytes_s": (s.nvlink_rate, near),
            "nvlink_rx_bytes_s": (s.nvlink_rate, near * (0.98 + 0.02 * far)),
            "pcie_tx_bytes_s": (s.pcie_tx_rate, far), "pcie_rx_bytes_s": (s.pcie_rx_rate, third),
        }  # fmt: skip
        for name, (rate, wave) in rates.items():
            if name in self._wanted:
                columns[name] = np.rint(true * rate[run][of] * wave).astype(np.float64)
        return columns

    def _device(
        self, run: Ints, held_mib: Singles, of: Ints, k: Singles, active: Singles, power: Singles, noise: Singles
    ) -> dict[str, npt.NDArray[np.generic]]:
        """The counters that need no profiling module."""
        s = self._signals
        columns: dict[str, npt.NDArray[np.generic]] = {}
        if "gpu_util_pct" in self._wanted:
            columns["gpu_util_pct"] = np.rint(active * 100)
        if "hbm_used_mib" in self._wanted:
            curve = np.minimum((k + 1) * s.hbm_ramp[run][of], np.float32(1))
            curve *= np.minimum(s.hbm_rise[run][of] + k * s.hbm_slope[run][of], np.float32(1))
            curve *= 1 - s.hbm_wave[run][of] * noise * (np.mod(k, np.float32(5)) > 0)
            columns["hbm_used_mib"] = np.rint(np.maximum(held_mib[of] * curve, _UNUSED_MIB))
        if "temp_c" in self._wanted:
            columns["temp_c"] = np.rint(24 + 0.05 * power + 0.05 * np.maximum(s.mean_watts[run], IDLE_W)[of])
        return columns


def _weights(s: Signals, run: Ints, position: Ints) -> Singles:
    """Duty of each GPU relative to the busiest, which is at position 0; their mean makes the spatial imbalance."""
    others = np.maximum(s.gpus[run] - 1, 1)
    rank = (position - 0.5) / others
    below = s.excess[run] * (1 + s.spread[run] * (2 * rank - 1))
    weight = np.where(position == 0, 1.0, np.where(s.is_one_gpu[run], 0.0, 1 - below))
    return (weight * (s.lead_util[run] > 0)).astype(np.float32)


def _held_mib(s: Signals, run: Ints, position: Ints, weight: Singles, key: Words) -> Singles:
    """Memory of each GPU when its curve is at 1: the busiest holds the job's peak, unused ones next to nothing."""
    part = np.where((position == 0) | s.hbm_equal[run], np.float32(1), 0.9 + 0.1 * _unit(_uniform4(key)[2]))
    is_used = (weight > 0) | (position == 0) | s.hbm_equal[run]
    held: Singles = (np.where(is_used, s.hbm_mib[run] * part, _UNUSED_MIB)).astype(np.float32)
    return held
