"""Presets of exporters (telemetry/exporters/*.toml), and whose sample a series is, by its labels."""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

from almanac.mig import profile_name
from telemetry.counters import COUNTERS, PARTS, Counter

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}")
_MIG = re.compile(r"[A-Za-z0-9_-]{0,64}")
_MAX_GPU = 2**15 - 1
MAX_JOB_ID = 2**53
"""Greatest job id that a float64, Prometheus' only type, holds exactly."""


@dataclass(frozen=True)
class Metric:
    """One name of a counter; dcgm.toml explains the fields."""

    name: str
    counter: Counter
    scale: float = 1.0
    least: float = 0.0
    since: str = ""
    is_default: bool = True
    is_listed: bool = True

    @property
    def is_profiling(self) -> bool:
        """True if DCGM takes it from the GPU's profiling counters, and not from the driver."""
        return "_PROF_" in self.name

    @property
    def limits(self) -> tuple[float, float]:
        """The lowest value but 0 that is expected, and the highest possible one, as the metric gives them."""
        return (self.least or self.counter.low) / self.scale, self.counter.high / self.scale

    def forbids(self, value: float, is_lowest: bool) -> bool:
        """True if the unit forbids the lowest or the highest value of some series, given as the metric has it."""
        scaled = value * self.scale
        return scaled < self.counter.low if is_lowest else scaled > self.counter.ceiling or 0 < scaled < self.least


@dataclass(frozen=True)
class Exporter:
    """Names and labels of one exporter, in the preset's order; dcgm.toml explains the fields."""

    name: str
    metrics: tuple[Metric, ...]
    host_labels: tuple[str, ...]
    gpu_labels: tuple[str, ...]
    uuid_label: str
    model_label: str
    job_label: str
    job_metric: str = ""
    mig_label: str = "GPU_I_ID"
    profile_label: str = "GPU_I_PROFILE"
    other_labels: tuple[str, ...] = ()
    prefix: str = ""
    unused: tuple[str, ...] = ()

    @cached_property
    def named(self) -> Mapping[str, Metric]:
        """Its metrics, by name."""
        return {metric.name: metric for metric in self.metrics}

    def names_of(self, column: str) -> tuple[Metric, ...]:
        """The metrics of a counter; of hbm_total_mib also those that free memory has, which it is made up of."""
        wanted = {"hbm_total_mib": ("hbm_total_mib", "hbm_free_mib")}.get(column, (column,))
        return tuple(metric for metric in self.metrics if metric.counter.column in wanted)

    def main(self, column: str) -> Metric:
        """The metric that switches a counter on: the one of our own list, else the first. Raises IndexError."""
        metrics = self.names_of(column)
        return next((metric for metric in metrics if metric.is_listed), metrics[0])

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The names, sorted, that are neither a counter's nor listed as unused."""
        return sorted(name for name in set(names) - self.named.keys() if not self.is_unused(name))

    def is_unused(self, name: str) -> bool:
        """True if the preset lists a metric as one that almanac does not need."""
        return name == self.job_metric or any(fnmatchcase(name, pattern) for pattern in self.unused)

    @property
    def own_labels(self) -> frozenset[str]:
        """The labels that identify the GPU, job, and counter of a series. Others are from Prometheus or the site."""
        named = {self.uuid_label, self.model_label, self.job_label, "__name__", *self.other_labels}
        return frozenset({*named, self.mig_label, self.profile_label, *self.host_labels, *self.gpu_labels})


def _preset(name: str) -> Exporter:
    """The exporter of telemetry/exporters/<name>.toml."""
    text = (files("telemetry") / "exporters" / f"{name}.toml").read_text(encoding="utf-8")
    given: dict[str, Any] = tomllib.loads(text)
    counters = {counter.column: counter for counter in (*COUNTERS, *PARTS)}
    metrics = [
        Metric(
            name=entry["name"],
            counter=counters[column],
            scale=entry.get("scale", 1.0),
            least=entry.get("least", 0.0),
            since=entry.get("since", ""),
            is_default=entry.get("default", True),
            is_listed=entry.get("listed", True),
        )
        for column, entries in given.pop("counters").items()
        for entry in entries
    ]
    labels: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return Exporter(name=name, metrics=tuple(metrics), **labels)


@cache
def presets() -> Mapping[str, Exporter]:
    """Every exporter that almanac knows, by name."""
    folder = files("telemetry") / "exporters"
    found = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return {name: _preset(name) for name in found}


FILE = Exporter(
    "file",
    tuple(Metric(counter.column, counter) for counter in COUNTERS),
    ("host",),
    ("gpu",),
    "uuid",
    "model",
    "job_label",
    mig_label="mig",
    profile_label="mig_profile",
)
"""A file to import: labels and counters have the names and units of the store."""


@dataclass(frozen=True, order=True)
class Gpu:
    """One GPU, or one MIG instance of it, of a cluster."""

    host: str
    gpu: int
    mig: str = ""


@dataclass(frozen=True)
class SeriesLabels:
    """Whose samples a series holds. job_id is None where no job is named, or where the label is no job id.

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
    if not re.fullmatch(r"[0-9]{1,5}", index) or int(index) > _MAX_GPU:
        raise UnusableSeriesError("gpu label is no GPU index")
    if not _MIG.fullmatch(mig):
        raise UnusableSeriesError("MIG label is no instance id")
    job_id, bad = parse_job_label(labels.get(exporter.job_label, ""))
    return SeriesLabels(
        Gpu(host, int(index), mig),
        labels.get(exporter.uuid_label, ""),
        labels.get(exporter.model_label, ""),
        job_id,
        bad,
        _profile(labels.get(exporter.profile_label) or labels.get(exporter.model_label, "")) if mig else "",
    )


def _profile(label: str) -> str:
    """The MIG profile in a label, such as "1g.10gb" or "NVIDIA A100-SXM4-80GB MIG 1g.10gb"; empty without one."""
    return profile_name(label) or ""


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
    """Whether each domain is the longest one, or its beginning: cluster and cluster.example."""
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
    """The job id of a label, and the label itself where it is none: "101" (101, ""), "" and "0" (None, "")."""
    if text in ("", "0"):
        return None, ""
    if re.fullmatch(r"[0-9]{1,16}", text) and 0 < int(text) <= MAX_JOB_ID:
        return int(text), ""
    return None, text
