"""Estimate the power and energy of jobs on MIG slices: the card's, by the slices' shares of its activity.

All slices of a card show its power. The activity of a slice is its utilization times its compute slices, and counts for
the time that its job was on the card. If a job on the node has no figures, there is no estimate: its share would go
to the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from almanac.hardware import engines_of
from almanac.units import DAY_S, format_number
from reports.job.job_report import FigureRow, GpuRow, JobRow, MetricsRow

if TYPE_CHECKING:
    from telemetry.store.store import ClusterStore

LOOKED_BACK_S = 30 * DAY_S
"""Jobs submitted longer before are not looked for on the card."""
_JOBS = ("job_id", "submit_s", "start_s", "end_s", "gpu_count", "node_list")
_GPUS = (
    "job_id", "submit_s", "host", "gpu", "mig", "mig_profile", "gpu_model", "hbm_capacity_mib", "mean_gpu_util_pct",
)  # fmt: skip

_Run = tuple[int, int]
_Span = tuple[int, int]


@dataclass(frozen=True)
class _SliceUse:
    """A job on a slice. size: compute slices; activity: the share of the card's engines that it keeps busy."""

    run: _Run
    span: _Span
    size: int | None
    activity: float | None

    @classmethod
    def of(cls, row: Mapping[str, Any] | GpuRow, span: _Span) -> _SliceUse:
        size = engines_of(row["mig_profile"], row["gpu_model"], row["hbm_capacity_mib"])
        util_pct = row["mean_gpu_util_pct"]
        return cls(_key(row), span, size, None if size is None or util_pct is None else size * util_pct / 100)


def estimate_energy(
    store: ClusterStore, jobs: Iterable[JobRow], gpus: Mapping[_Run, list[GpuRow]]
) -> dict[_Run, MetricsRow]:
    """The columns power_estimate_w and energy_estimate_j of ended jobs that had slices only, by run."""
    spans = {
        _key(job): (start_s, end_s)
        for job in jobs
        if (rows := gpus.get(_key(job))) and all(row["mig"] and row["mean_power_w"] is not None for row in rows)
        if (start_s := job["start_s"]) is not None and (end_s := job["end_s"]) is not None and start_s < end_s
    }
    if not spans:
        return {}
    hosts = {row["host"] for run in spans for row in gpus[run]}
    cards, silent = _load(store, spans, hosts)
    found = {}
    for run, span in spans.items():
        if any(_overlap_s(span, other) for row in gpus[run] for other in silent[row["host"]]):
            continue
        powers = [
            None if share is None or row["mean_power_w"] is None else share * row["mean_power_w"]
            for row in gpus[run]
            for share in [_share(_SliceUse.of(row, span), cards[row["host"], row["gpu"]])]
        ]
        known = [power for power in powers if power is not None]
        if len(known) == len(powers):
            found[run] = MetricsRow(power_estimate_w=sum(known), energy_estimate_j=sum(known) * (span[1] - span[0]))
    return found


def energy_row(metrics: MetricsRow) -> FigureRow | None:
    """The measured energy, or else the estimate, which says that it is one; None without both."""
    energy_j, power_w = metrics.get("energy_j"), metrics.get("energy_power_w")
    if energy_j is not None:
        about = "" if power_w is None else f"{power_w:.0f} W per GPU on average"
        return FigureRow("GPU energy", f"{format_number(energy_j / 3.6e6, 3)} kWh", about)
    energy_j, power_w = metrics.get("energy_estimate_j"), metrics.get("power_estimate_w")
    if energy_j is None or power_w is None:
        return None
    about = f"estimate: {power_w:.0f} W, by its share of the GPU's activity"
    return FigureRow("GPU energy", f"about {format_number(energy_j / 3.6e6, 3)} kWh", about)


def _key(row: Mapping[str, Any] | JobRow | GpuRow) -> _Run:
    return row["job_id"], row["submit_s"]


def _load(
    store: ClusterStore, spans: Mapping[_Run, _Span], hosts: set[str]
) -> tuple[dict[tuple[str, int], list[_SliceUse]], dict[str, list[_Span]]]:
    """The jobs on each card of the hosts, and by host the spans of GPU jobs whose GPUs are not known."""
    # Late: slurm-almanac-client lacks these libraries.
    # Late: the client package, which has no Arrow, reads published reports.
    import pyarrow as pa

    from telemetry.attribution.allocations import parse_hosts
    from telemetry.history import plain_rows

    first_s, last_s = min(start for start, _ in spans.values()), max(end for _, end in spans.values())
    since_s = min(submit_s for _, submit_s in spans) - LOOKED_BACK_S
    table = store.read("gpu_metrics", _GPUS, since_s, last_s, {"host": pa.array(sorted(hosts))})
    rows = plain_rows(table)
    measured = {(*_key(row), row["host"]) for row in rows}
    runs: dict[_Run, _Span] = {}
    silent: dict[str, list[_Span]] = defaultdict(list)
    for job in _at_once(plain_rows(store.read("jobs", _JOBS, since_s, last_s)), first_s, last_s):
        runs[_key(job)] = span = job["start_s"], job["end_s"] or last_s
        for host in hosts & set(parse_hosts(job["node_list"])):
            if (*_key(job), host) not in measured:
                silent[host].append(span)
    cards: dict[tuple[str, int], list[_SliceUse]] = defaultdict(list)
    for row in rows:
        if span_of := runs.get(_key(row)):
            cards[row["host"], row["gpu"]].append(_SliceUse.of(row, span_of))
    return cards, silent


def _at_once(jobs: Iterable[Mapping[str, Any]], first_s: int, last_s: int) -> Iterator[Mapping[str, Any]]:
    """GPU jobs that ran at some time of the span."""
    for job in jobs:
        start_s = job["start_s"]
        if job["gpu_count"] and start_s is not None and start_s < last_s and (job["end_s"] or last_s) > first_s:
            yield job


def _overlap_s(one: _Span, other: _Span) -> int:
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))


def _share(own: _SliceUse, card: Iterable[_SliceUse]) -> float | None:
    """The share of the card's activity; of its slices in use if none was active; None if a part is not known."""
    beside = [(part, _overlap_s(own.span, part.span)) for part in card]
    beside = [(part, time_s) for part, time_s in beside if time_s]
    if own.activity is None or own.size is None or any(part.activity is None for part, _ in beside):
        return None
    length_s = own.span[1] - own.span[0]
    activity = sum((part.activity or 0.0) * time_s for part, time_s in beside)
    if activity:
        return own.activity * length_s / activity
    return own.size * length_s / sum((part.size or 0) * time_s for part, time_s in beside)
