"""Judge one round of running jobs by what the rounds before it showed.

`decide` is pure. A GPU without samples is unknown: it starts, prolongs, and ends nothing, and after a silence that is
longer than `WatchRules.silence_s` everything that was seen of it before counts no more. docs/watch.md explains each
rule; the bits of throttle reasons are those of nvml.h (nvmlClocksThrottleReason*, driver 560).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from advisor.watch.growth import Points, WatchedMemory, growing
from advisor.watch.round import GPU_COUNTERS, MOST_KEPT_S, Kind, Round, WatchFinding, comment_words
from advisor.watch.words import said_of

_Doubles = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]

SETTLE_S = 60
"""After a job's start, the time for its GPUs' samples to be its own: clocks and scrapes differ by less."""
USED_FROM = 0.02
"""Share of the time, or of the pipes' cycles, from which on a GPU is in use."""
_PIPES = ("tensor_active_frac", "dram_active_frac", "fp64_active_frac", "fp32_active_frac", "fp16_active_frac")
_STILL = {"tensor_active_frac": 0.005, "dram_active_frac": 0.01, "fp64_active_frac": 0.005,
          "fp32_active_frac": 0.1, "fp16_active_frac": 0.005, "nvlink_bytes_s": 1e6}  # fmt: skip
"""Highest activity of a GPU whose kernel only waits for others; waiting takes integer instructions, an FP32 counter."""
_SLOWED, _BRAKED = 0x8 | 0x20 | 0x40, 0x80
"""Slowed by the hardware or for heat; power brake. A power cap that the site set (0x4) is no fault."""
_EVENTS: Mapping[str, Kind] = {"xid": "xid", "ecc_uncorrected": "ecc"}
MOST_GPUS = 400_000


@dataclass(frozen=True)
class WatchRules:
    """Times that a condition must hold to be a finding, s; see docs/watch.md."""

    silence_s: int = 600
    idle_s: int = 1800
    unused_s: int = 1800
    hang_s: int = 600
    slowed_s: int = 600
    tell_limit_s: int = 1800
    over_limit_prob: float = 0.8
    host_memory_frac: float = 0.95


RULES = WatchRules()
FROZEN = 5
"""Rounds in a row in which a GPU draws exactly the same power: its exporter repeats an old sample."""


class WatchState(msgspec.Struct):
    """Kept between two rounds: columns of numbers by GPU of a running job, and the memory of fuller jobs.

    gpus: "job_id.start_s host gpu". columns: see `_COLUMNS`, each as float64; -1: unknown, or not so. growth: by job,
    times since its start and MiB.
    """

    at_s: int = 0
    gpus: list[str] = msgspec.field(default_factory=list)
    columns: dict[str, bytes] = msgspec.field(default_factory=dict)
    growth: Points = msgspec.field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Return True for a state of this release: it has every column, each as long as the list of GPUs."""
        sizes = {name: len(values) for name, values in self.columns.items()}
        return sizes == (dict.fromkeys(_COLUMNS, 8 * len(self.gpus)) if self.gpus or sizes else {})

    def column(self, name: str) -> _Doubles:
        return np.frombuffer(self.columns.get(name, b""), "<f8")


_SPANS = ("idle", "unused", "hang", "throttled", "power_brake")
_COLUMNS = (
    "seen_s", "active", "used", "rate", "power_w", "same",
    *(f"{name}{of}" for name in _EVENTS for of in ("", "_s", "_met")),
    *(f"{kind}_since_s" for kind in _SPANS), *(f"{kind}_known_s" for kind in _SPANS),
)  # fmt: skip
"""seen_s: end of the last span with samples; active: 1 if it was in use in that span; used: 1 if it ever was; rate: the
highest number of samples per second; same: rounds in a row with the same power; xid, xid_s, xid_met: the gauge, when
it changed in the job's time, and its value then: it may show another code later."""


class _Frame:
    """The GPUs of the round, and those of its jobs that only the state knows, with the state's columns."""

    def __init__(self, round_: Round, state: WatchState, silence_s: int) -> None:
        jobs, gpus = round_.jobs, round_.gpus
        self.keys = [f"{job}.{start}" for job, start in zip(*_lists(jobs, "job_id", "start_s"), strict=True)]
        places = {key: place for place, key in enumerate(self.keys)}
        job, host, gpu = _lists(gpus, "job", "host", "gpu")
        names = [f"{self.keys[j]} {h} {g}" for j, h, g in zip(job, host, gpu, strict=True)]
        old = {name: row for row, name in enumerate(state.gpus)}
        known, seen_s = set(names), state.column("seen_s")
        lost = [
            name for name, row in old.items()
            if name not in known and name.split(" ", 1)[0] in places and round_.at_s - seen_s[row] <= silence_s
        ]  # fmt: skip
        self.names = [*names, *lost]
        self.job: _Ints = np.array([*job, *(places[name.split(" ", 1)[0]] for name in lost)], dtype=np.int64)
        self.now = {name: np.append(_doubles(gpus, name), np.full(len(lost), np.nan)) for name in GPU_COUNTERS}
        self.samples = np.append(np.nan_to_num(_doubles(gpus, "sample_count")), np.zeros(len(lost)))
        row = np.array([old.get(name, -1) for name in self.names], dtype=np.int64)
        self.was: dict[str, _Doubles] = {name: np.append(state.column(name), -1.0)[row] for name in _COLUMNS}

    def kept(self, at_s: int, growth: Points) -> WatchState:
        most = slice(MOST_GPUS)
        return WatchState(
            at_s,
            self.names[most],
            {name: values[most].astype("<f8").tobytes() for name, values in self.was.items()},
            growth,
        )


def decide(state: WatchState | None, round_: Round, rules: WatchRules = RULES) -> tuple[WatchState, list[WatchFinding]]:
    """Return what to keep, and the findings of the round by job. A round that is not newer than the state finds none.

    A state from the future is a wrong clock's, and counts as none.
    """
    if state is None or state.at_s > round_.at_s + SETTLE_S:
        state = WatchState()
    if round_.at_s <= state.at_s:
        return state, []
    frame = _Frame(round_, state, rules.silence_s)
    jobs = {name: round_.jobs[name].to_pylist() for name in round_.jobs.column_names}
    is_own = np.array(jobs["start_s"], dtype=np.float64)[frame.job] + SETTLE_S <= round_.at_s - round_.span_s
    _observe(frame, round_, jobs, rules, is_own)
    judge = _Judge(frame, round_, jobs, rules)
    used, total = frame.now["hbm_used_mib"], frame.now["hbm_total_mib"]
    memory = WatchedMemory(frame.keys, frame.job, used, total, is_own & (frame.samples > 0))
    growth, full = growing(memory, jobs, round_.at_s, state.growth)
    found = [
        *judge.idle_or_unused(), *judge.hangs(), *judge.slowed(), *judge.events(), *judge.full(full), *judge.by_job()
    ]  # fmt: skip
    return frame.kept(round_.at_s, growth), sorted(found, key=lambda finding: (finding.job_id, finding.kind))


def _observe(
    frame: _Frame, round_: Round, jobs: Mapping[str, Sequence[Any]], rules: WatchRules, is_own: _Flags
) -> None:
    """Bring the columns of the state up to date. is_own: flags of the GPUs whose samples are of their job's time."""
    was, now, at_s, span_s = frame.was, frame.now, float(round_.at_s), float(round_.span_s)
    activity = _activity(now)
    is_known = (frame.samples > 0) & ~np.isnan(activity) & is_own
    is_cut = (was["seen_s"] < 0) | (at_s - span_s - was["seen_s"] > rules.silence_s)
    for kind in _SPANS:
        was[f"{kind}_since_s"][is_cut] = was[f"{kind}_known_s"][is_cut] = -1.0
    rate = frame.samples / span_s
    was["rate"] = np.where(is_known, np.maximum(was["rate"], rate), was["rate"])
    since_s = np.where(was["seen_s"] < 0, at_s - span_s, np.maximum(was["seen_s"], at_s - span_s))
    share = np.divide(rate, was["rate"], out=np.zeros_like(rate), where=was["rate"] > 0)
    gained_s = np.where(is_known, (at_s - since_s) * np.minimum(share, 1.0), 0.0)
    was["active"] = np.where(is_known, activity >= USED_FROM, was["active"])
    was["used"] = np.where(is_known & (activity >= USED_FROM), 1.0, was["used"])
    reasons = np.nan_to_num(now["throttle_reasons"]).astype(np.int64)
    rests = (activity < USED_FROM) & ~_may_idle(jobs, round_.at_s)[frame.job]
    works = np.zeros(len(frame.keys), dtype=np.bool_)
    works[frame.job[is_known & ~rests]] = True
    holds = {
        "idle": rests & ~works[frame.job],
        "unused": rests & (was["used"] <= 0),
        "hang": _only_waits(now),
        "throttled": (reasons & _SLOWED != 0) & (activity >= USED_FROM),
        "power_brake": reasons & _BRAKED != 0,
    }
    for kind, flags in holds.items():
        since, known = was[f"{kind}_since_s"], was[f"{kind}_known_s"]
        begins = is_known & flags & (since < 0)
        since[begins], known[begins] = at_s - span_s, 0.0
        ends = works[frame.job] if kind == "idle" else is_known & ~flags
        since[ends] = known[ends] = -1.0
        known[is_known & flags] += gained_s[is_known & flags]
    for name in _EVENTS:
        _note_events(name, frame, is_own & (frame.samples > 0), at_s)
    is_same, is_unknown = now["power_w"] == was["power_w"], np.isnan(now["power_w"])
    was["same"] = np.where(is_unknown, was["same"], np.where(is_same, np.maximum(was["same"], 0.0) + 1, 0.0))
    was["power_w"] = np.where(is_unknown, was["power_w"], now["power_w"])
    was["seen_s"] = np.where(is_known, at_s, was["seen_s"])


def _note_events(name: str, frame: _Frame, is_own: _Flags, at_s: float) -> None:
    """Note the time at which a counter changed; the value that it had before the job is nobody's fault."""
    was, value = frame.was, frame.now[name]
    changed = ~np.isnan(value) & (was[name] >= 0) & (value != was[name]) & (value > 0)
    if name == "xid":
        changed |= (np.nan_to_num(frame.now["xid_changes"]) > 0) & (value > 0)
    else:
        changed &= value > was[name]
    was[f"{name}_s"] = np.where(changed & is_own, at_s, was[f"{name}_s"])
    was[f"{name}_met"] = np.where(changed & is_own, value, was[f"{name}_met"])
    was[name] = np.where(np.isnan(value), was[name], value)


def _activity(now: Mapping[str, _Doubles]) -> _Doubles:
    """The highest activity that any counter shows; NaN without GPU_UTIL and GR_ENGINE_ACTIVE.

    The other profiling counters can read 0 on a busy GPU after an XID 31, so that alone they show no idle GPU.
    """
    whole = np.fmax(now["gpu_util_pct"] / 100, now["gr_engine_active_frac"])
    parts = [np.nan_to_num(now[name]) for name in ("sm_active_frac", *_PIPES)]
    return np.where(np.isnan(whole), np.nan, np.maximum.reduce([np.nan_to_num(whole), *parts]))


def _only_waits(now: Mapping[str, _Doubles]) -> _Flags:
    """Flags of GPUs that a kernel keeps busy without work: all of the time, with warps, but without tensor and DRAM.

    Without a sign of warps the profiling counters have failed, and show nothing.
    """
    has_warps = (now["sm_active_frac"] >= USED_FROM) | (now["gr_engine_active_frac"] >= 0.5)
    is_still = ~np.isnan(now["tensor_active_frac"]) & ~np.isnan(now["dram_active_frac"])
    for name, most in _STILL.items():
        is_still &= ~(now[name] > most)
    return (np.nan_to_num(now["gpu_util_pct"]) >= 95) & has_warps & is_still


def _may_idle(jobs: Mapping[str, Sequence[Any]], at_s: int) -> _Flags:
    """Flags of jobs that serve or load: by their own words, for a bounded time, or by an inference server's metrics."""
    found = np.array(jobs["is_serving"], dtype=np.bool_)
    for row, (comment, start_s) in enumerate(zip(jobs["comment"], jobs["start_s"], strict=True)):
        if comment and "almanac:" in comment:
            words = comment_words(comment)
            found[row] |= at_s < start_s + max(MOST_KEPT_S * words.is_serving, words.loading_s)
    return found


class _Judge:
    """The findings of a round, by job. Only jobs with samples of the last `silence_s` are judged."""

    def __init__(self, frame: _Frame, round_: Round, jobs: Mapping[str, Sequence[Any]], rules: WatchRules) -> None:
        self.frame, self.round, self.jobs, self.rules = frame, round_, jobs, rules
        self.rows: dict[int, list[int]] = defaultdict(list)
        is_near = round_.at_s - frame.was["seen_s"] <= rules.silence_s
        for row in np.flatnonzero(is_near).tolist():
            self.rows[int(frame.job[row])].append(row)

    def idle_or_unused(self) -> list[WatchFinding]:
        """Jobs that use no GPU, and GPUs that were never in use while others of the job were."""
        found = []
        was, gpu_count = self.frame.was, self.jobs["gpu_count"]
        for job, rows in self._with((was["idle_since_s"] >= 0) | (was["unused_since_s"] >= 0)):
            if len(rows) != gpu_count[job]:
                continue
            if all(was["idle_since_s"][row] >= 0 for row in rows):
                found += self._lasting("idle", job, rows, self.rules.idle_s)
                continue
            never = [row for row in rows if was["unused_since_s"][row] >= 0]
            if never and any(was["used"][row] > 0 for row in rows):
                found += self._lasting("unused_gpus", job, never, self.rules.unused_s, span="unused")
        return found

    def hangs(self) -> list[WatchFinding]:
        """Jobs whose GPUs in use, two or more, all wait: a single GPU has nobody to wait for. All GPUs must be seen."""
        found = []
        was = self.frame.was
        for job, rows in self._with(was["hang_since_s"] >= 0):
            waiting = [row for row in rows if was["hang_since_s"][row] >= 0]
            others = [row for row in rows if was["hang_since_s"][row] < 0 and was["active"][row] > 0]
            if len(waiting) >= 2 and not others and len(rows) == self.jobs["gpu_count"][job]:
                found += self._lasting("hang", job, waiting, self.rules.hang_s, seen=rows)
        return found

    def slowed(self) -> list[WatchFinding]:
        found = []
        kinds: tuple[Kind, ...] = ("throttled", "power_brake")
        for kind in kinds:
            since = self.frame.was[f"{kind}_since_s"]
            for job, rows in self._with((since >= 0) & (self.round.at_s - since >= self.rules.slowed_s)):
                slow = [row for row in rows if 0 <= since[row] <= self.round.at_s - self.rules.slowed_s]
                found += self._lasting(kind, job, slow, self.rules.slowed_s)
        return found

    def events(self) -> list[WatchFinding]:
        """XIDs and uncorrected errors in the job's time, and GPUs that have no spare rows left."""
        found = []
        for name, kind in _EVENTS.items():
            time_s, value = self.frame.was[f"{name}_s"], self.frame.was[f"{name}_met"]
            for job, rows in self._with(time_s >= 0):
                hit = [row for row in rows if time_s[row] >= 0]
                last_s = int(max(time_s[row] for row in hit))
                numbers = {"values": sorted({int(value[row]) for row in hit})}
                found.append(self._finding(kind, job, hit, last_s, last_s, 1.0, numbers))
        failed = np.nan_to_num(self.frame.now["row_remap_failures"]) > 0
        for job, rows in self._with(failed):
            hit = [row for row in rows if failed[row]]
            found.append(self._finding("row_remap", job, hit, self.round.at_s, self.round.at_s, 1.0, {}))
        return found

    def full(self, rows: Sequence[tuple[int, dict[str, Any]]]) -> list[WatchFinding]:
        at_s = self.round.at_s
        return [self._finding("memory_full", int(self.frame.job[row]), [row], at_s, at_s, 1.0, numbers)
                for row, numbers in rows]  # fmt: skip

    def by_job(self) -> list[WatchFinding]:
        """Host memory near its limit, and jobs that will meet their time limit: columns of the job itself."""
        found, at_s = [], self.round.at_s
        columns = ("host_used_mib", "host_limit_mib", "over_limit_prob", "limit_end_s")
        for job, row in enumerate(zip(*(self.jobs[name] for name in columns), strict=True)):
            used, most, chance, end_s = row
            if used is not None and most and used >= self.rules.host_memory_frac * most:
                numbers = {"used_mib": used, "limit_mib": most}
                found.append(self._finding("host_memory", job, [], at_s, at_s, 1.0, numbers))
            if chance is None or end_s is None or not 0 < end_s - at_s <= self.rules.tell_limit_s:
                continue
            if chance >= self.rules.over_limit_prob:
                numbers = {"left_s": end_s - at_s, "chance": chance}
                found.append(self._finding("limit", job, [], at_s, at_s, 1.0, numbers))
        return found

    def _with(self, flags: _Flags) -> list[tuple[int, list[int]]]:
        """Jobs with a flagged GPU, and all rows of each that are judged."""
        return [(job, self.rows[job]) for job in np.unique(self.frame.job[flags]).tolist() if job in self.rows]

    def _lasting(
        self, kind: Kind, job: int, rows: Sequence[int], least_s: int, span: str = "", seen: Sequence[int] = ()
    ) -> list[WatchFinding]:
        """Return the finding once it has lasted. seen: GPUs that also have to be seen until its end."""
        was = self.frame.was
        since_s = max(was[f"{span or kind}_since_s"][row] for row in rows)
        until_s = min(was["seen_s"][row] for row in seen or rows)
        if until_s - since_s < least_s:
            return []
        # A GPU that rests for longer than the last one may have been seen before since_s alone.
        own = ((was[f"{span or kind}_known_s"][row], since_s - was[f"{span or kind}_since_s"][row]) for row in rows)
        coverage = min(known - before for known, before in own) / (until_s - since_s)
        share = min(max(coverage, 0.0), 1.0)
        return [self._finding(kind, job, rows, int(since_s), int(until_s), share, {}, seen or rows)]

    def _finding(
        self, kind: Kind, job: int, rows: Sequence[int], since_s: int, until_s: int, coverage: float,
        numbers: Mapping[str, Any], judged: Sequence[int] = (),
    ) -> WatchFinding:  # fmt: skip
        """judged: GPUs whose use is part of the finding, so that a counter that one of them lacks makes it suspect."""
        names = [":".join(self.frame.names[row].split(" ")[1:]) for row in rows]
        evidence = {"gpus": names[:16], "gpu_count": len(rows), "of_gpus": self.jobs["gpu_count"][job], **numbers}
        for name in ("hbm_used_mib", "power_w", "gpu_util_pct") if kind in ("idle", "unused_gpus", "hang") else ():
            values = [self.frame.now[name][row] for row in rows]
            if known := [value for value in values if not math.isnan(value)]:
                evidence[name] = round(float(max(known)), 1)
        row = {name: values[job] for name, values in self.jobs.items()}
        says = said_of(kind, row, evidence, since_s, until_s, self.round.at_s)
        is_frozen = any(self.frame.was["same"][row] >= FROZEN for row in judged or rows)
        is_suspect = is_frozen or any(map(self._lacks, judged))
        coverage = round(float(coverage), 4)
        return WatchFinding(row["job_id"], row["start_s"], kind, since_s, until_s, coverage, evidence, says, is_suspect)

    def _lacks(self, row: int) -> bool:
        """Return True if a GPU has no power now, or no GPU_UTIL, which exporters do not give for MIG slices."""
        now, is_slice = self.frame.now, ":" in self.frame.names[row].rpartition(" ")[2]
        return bool(np.isnan(now["power_w"][row]) or (np.isnan(now["gpu_util_pct"][row]) and not is_slice))


def _lists(table: pa.Table, *names: str) -> list[list[Any]]:
    return [table[name].to_pylist() for name in names]


def _doubles(table: pa.Table, name: str) -> _Doubles:
    return np.asarray(table[name].to_numpy(zero_copy_only=False), dtype=np.float64)
