"""Series of exporters: the GPU, host, and job that labels name, and values that their unit allows."""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from almanac.hardware import profile_name
from almanac.records import Counts
from telemetry.sources.exporters import Exporter, Metric

_Flags = npt.NDArray[np.bool_]
_Ints = npt.NDArray[np.int64]
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}")
_MIG = re.compile(r"[A-Za-z0-9_-]{0,64}")
_MAX_GPU = 2**15 - 1
MAX_JOB_ID = 2**53
"""Greatest job id that a float64, Prometheus' only type, holds exactly."""


@dataclass(frozen=True, order=True)
class Gpu:
    """One GPU, or one MIG instance of it, of a cluster."""

    host: str
    gpu: int
    mig: str = ""


@dataclass(frozen=True)
class SeriesLabels:
    """The owner of the samples of a series. job_id is None if no job is named, or if the label is no job id.

    profile: the MIG profile that the exporter names, such as "1g.10gb"; empty without one.
    """

    gpu: Gpu
    uuid: str
    model: str
    job_id: int | None = None
    bad_job_label: str = ""
    profile: str = ""


class UnusableSeriesError(ValueError):
    """A series that belongs to no GPU that can be named; the message is the reason to count."""


def identify(
    labels: Mapping[str, str], exporter: Exporter, host_suffix: str = "", apart: Collection[str] = ()
) -> SeriesLabels:
    """The GPU, device and job that a series' labels name. apart: see `host_of`. Raises UnusableSeriesError."""
    host = host_of(labels, exporter, host_suffix, apart)
    index = _first(labels, exporter.gpu_labels)
    mig = labels.get(exporter.mig_label, "")
    if not index:
        raise UnusableSeriesError("no gpu label")
    if re.fullmatch(r"(GPU|MIG)-[0-9a-f-]{36}", index):
        raise UnusableSeriesError("gpu label is a UUID, which says no index")
    if not re.fullmatch(r"[0-9]{1,5}", index) or int(index) > _MAX_GPU:
        raise UnusableSeriesError("gpu label is no GPU index")
    if not _MIG.fullmatch(mig):
        raise UnusableSeriesError("MIG label is no instance id")
    model = _first(labels, exporter.model_labels)
    job_id, bad = parse_job_label(labels.get(exporter.job_label, ""))
    return SeriesLabels(
        Gpu(host, int(index), mig),
        labels.get(exporter.uuid_label, ""),
        model,
        job_id,
        bad,
        profile_name(labels.get(exporter.profile_label) or model) or "" if mig else "",
    )


def host_of(labels: Mapping[str, str], exporter: Exporter, host_suffix: str = "", apart: Collection[str] = ()) -> str:
    """The host that a series' labels name, without its domain. Raises UnusableSeriesError.

    apart: short names that several hosts share (`shared_names`); such a host keeps its domain.
    """
    host = _whole_host(labels, exporter)
    if not host:
        raise UnusableSeriesError("no host label")
    if not _HOST.fullmatch(host):
        raise UnusableSeriesError("host label is no host name")
    short = short_host(host, host_suffix)
    return host if short.lower() in apart else short


def shared_names(series: Iterable[Mapping[str, str]], exporter: Exporter) -> frozenset[str]:
    """The short names, in lower case, of hosts that differ only in their domain: n1.a.example and n1.b.example."""
    domains: dict[str, set[str]] = defaultdict(set)
    for host in {_whole_host(labels, exporter) for labels in series}:
        short, _, domain = host.lower().partition(".")
        if short_host(host) != host:
            domains[short].add(domain)
    return frozenset(short for short, found in domains.items() if not _is_one_domain(found))


def _is_one_domain(domains: set[str]) -> bool:
    """Return True if each domain is the longest one, or its beginning: cluster and cluster.example."""
    longest = max(domains, key=len)
    return all(f"{longest}.".startswith(f"{domain}.") for domain in domains)


def _whole_host(labels: Mapping[str, str], exporter: Exporter) -> str:
    name = next((name for name in exporter.host_labels if labels.get(name)), "")
    return _without_port(labels[name]) if name == "instance" else labels.get(name, "")


def _first(labels: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def _without_port(instance: str) -> str:
    """The host of "host:9445" and "[::1]:9445"."""
    return instance[1:].partition("]")[0] if instance.startswith("[") else instance.partition(":")[0]


def short_host(host: str, suffix: str = "") -> str:
    """A host name as Slurm has it: without `suffix`, or without everything after the first dot where that is empty.

    An address stays whole: "10.0.0.5" is not the host "10".
    """
    if suffix:
        return host.removesuffix("." + suffix.lstrip("."))
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.partition(".")[0] or host
    return host


def parse_job_label(text: str) -> tuple[int | None, str]:
    """The job id of a label, and the label itself if it is no id: "101" (101, ""), "" and "0" (None, "")."""
    if text in ("", "0"):
        return None, ""
    if re.fullmatch(r"[0-9]{1,16}", text) and 0 < int(text) <= MAX_JOB_ID:
        return int(text), ""
    return None, text


Replica = tuple[tuple[str, str], ...]
"""The labels of a series that do not identify the GPU or its job, sorted.

Copies of a scrape, by a second Prometheus server, differ only in these, such as `replica`, `instance`, and `pod`, and
in their timestamps.
"""

NEAR = 0.75
"""Share of a scrape interval: copies lie at most half of it apart, and scrapes of one server about all of it."""


def replica_of(labels: Mapping[str, str], known: Collection[str]) -> Replica:
    """The replica that a series comes from. known: labels that identify its GPU and job."""
    return tuple(sorted((name, text) for name, text in labels.items() if name not in known))


def copies(gpu: _Ints, time_ms: _Ints, replica: _Ints, span_ms: tuple[int, int]) -> _Flags:
    """Flags of the scrapes that are copies. The replica with the lowest number counts; others fill its gaps.

    gpu, time_ms: sorted. span_ms: [start, end) of the query; a replica can have scrapes outside it.
    """
    found = np.zeros(len(gpu), dtype=bool)
    first = np.flatnonzero(np.diff(gpu, prepend=-1))
    low, high = (limit.reduceat(replica, first) if len(first) else replica[:0] for limit in (np.minimum, np.maximum))
    ends = np.append(first[1:], len(gpu))
    for start, end in zip(first[low < high].tolist(), ends[low < high].tolist(), strict=True):
        found[start:end] = _copies_of_one(time_ms[start:end], replica[start:end], span_ms)
    return found


def _copies_of_one(time_ms: _Ints, replica: _Ints, span_ms: tuple[int, int]) -> _Flags:
    numbers = np.unique(replica)
    found = np.zeros(len(time_ms), dtype=bool)
    kept = time_ms[replica == numbers[0]]
    for number in numbers[1:].tolist():
        own = replica == number
        gap_ms = _median_gap_ms(kept) or _median_gap_ms(time_ms[own])
        near = _distance(time_ms[own], _extended(kept, gap_ms, span_ms)) < NEAR * gap_ms
        found[own] = near
        kept = np.sort(np.concatenate([kept, time_ms[own][~near]]))
    return found


def _median_gap_ms(time_ms: _Ints) -> float:
    return float(np.median(np.diff(time_ms))) if len(time_ms) > 1 else 0.0


def _extended(kept: _Ints, gap_ms: float, span_ms: tuple[int, int]) -> _Ints:
    """Add the scrapes just before and after the span, which were not read, if the replica was up at its ends."""
    before, after = kept[:1] - int(gap_ms), kept[-1:] + int(gap_ms)
    return np.concatenate([before[before < span_ms[0]], kept, after[after >= span_ms[1]]])


def _distance(time_ms: _Ints, kept: _Ints) -> _Ints:
    """The distance between each time and the nearest kept one. kept: sorted."""
    at = np.searchsorted(kept, time_ms)
    later, earlier = kept[np.minimum(at, len(kept) - 1)], kept[np.maximum(at - 1, 0)]
    nearest: _Ints = np.minimum(np.abs(later - time_ms), np.abs(time_ms - earlier))
    return nearest


_OTHER = {"%": 100.0, "fraction": 100.0, "MiB": 2.0**20, "W": 1000.0}
"""By our unit, its ratio to the one that is easily taken for it: percent and ratio, MiB and bytes, W and mW."""


def within_unit(
    metric: Metric, value: npt.NDArray[np.float64], series: _Ints, usable: _Flags, counts: Counts
) -> _Flags:
    """Flags of the usable samples to keep; the others of the usable ones are counted, by metric.

    value: in our unit; what is kept may lie above counter.high, up to its ceiling. series: the number of each sample's
    series. If most of a series' values but 0 are wrong and would be right in the other unit, such as percent for a
    ratio, none of them can be believed: a 1 would be 100%, and zeros alone would be an idle GPU. If a metric has such a
    series, one of only 0 and 1 may have that unit too.
    """
    counter, factor = metric.counter, _OTHER.get(metric.counter.unit, 1.0)
    if not metric.zero and (value == 0).any():
        counts.drop(f"0 is no measurement: {metric.name}", int(np.sum(usable & (value == 0))))
        usable = usable & (value != 0)
    keep: _Flags = usable & (value >= counter.low) & (value <= counter.ceiling)
    is_small = (value < metric.least) & (value > 0) if metric.least else np.zeros(1, dtype=bool)
    if keep.all() and not is_small.any():
        return keep
    finite = usable & np.isfinite(value)
    counts.drop(f"not a number: {metric.name}", int(np.sum(usable & ~finite)))
    beyond = finite & ~keep
    odd = beyond | (finite & is_small)
    if not odd.any():
        return keep
    in_other = np.where(value > counter.ceiling, value / factor, value * factor)
    explained = odd & (in_other >= max(counter.low, metric.least)) & (in_other <= counter.ceiling)
    given, number = finite & (value != 0), int(series.max(initial=0)) + 1
    odds, all_given = np.bincount(series[explained], minlength=number), np.bincount(series[given], minlength=number)
    is_foreign = 2 * odds > all_given
    if is_foreign.any():
        telling = given & ~np.isclose(value, metric.scale, rtol=0.01)
        is_foreign |= (np.bincount(series[telling], minlength=number) == 0) & (all_given > 0)
    wrong = finite & (beyond | is_foreign[series])
    examples = value[wrong & odd] / metric.scale
    said = "{:.7g} (expected: {:.7g} to {:.7g})".format(examples[0], *metric.limits) if len(examples) else ""
    counts.drop(f"unit mismatch: {metric.name}", int(wrong.sum()), said)
    return keep & ~wrong
