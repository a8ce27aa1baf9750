"""What exporters call their metrics and labels, and whose sample a series therefore is.

dcgm-exporter: labels gpu, UUID, modelName, Hostname (`hostname` on newer releases), hpc_job; under MIG GPU_I_ID and
GPU_I_PROFILE ("1g.10gb"). NVIDIA reuses the ids of GPU instances: after a change of layout an id can be another one.
jobstats' nvidia_gpu_prometheus_exporter: minor_number (the index of /dev/nvidiaN, by which Slurm and jobstats
count too; `ordinal` is NVML's own order and may differ), uuid, name, GPU_I_ID; the host is Prometheus' own `instance`.
It names no profile. Its job id is the label `jobid` on newer releases and the value of `nvidia_gpu_jobId` on all.
"""

from __future__ import annotations

import ipaddress
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from almanac.config import ExporterName
from almanac.mig import profile_name
from telemetry.counters import COUNTERS, Counter

_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,254}")
_MIG = re.compile(r"[A-Za-z0-9_-]{0,64}")
_MAX_GPU = 2**15 - 1
MAX_JOB_ID = 2**53
"""Greatest job id that a float64, Prometheus' only type, holds exactly."""


@dataclass(frozen=True)
class Exporter:
    """Names of one exporter. `*_labels` are tried in order. total_is_free: hbm_total_mib is read as used + free."""

    name: ExporterName | Literal["file"]
    host_labels: tuple[str, ...]
    gpu_labels: tuple[str, ...]
    uuid_label: str
    model_label: str
    job_label: str
    job_metric: str = ""
    mig_label: str = "GPU_I_ID"
    profile_label: str = "GPU_I_PROFILE"
    total_is_free: bool = False

    def metric(self, counter: Counter) -> str:
        """This exporter's name of a counter; empty where it has none."""
        return {"dcgm": counter.dcgm, "jobstats": counter.jobstats}.get(self.name, counter.column)

    def scale(self, counter: Counter) -> float:
        """What turns its value of a counter into ours."""
        return {"dcgm": counter.dcgm_scale, "jobstats": counter.jobstats_scale}.get(self.name, 1.0)

    @property
    def own_labels(self) -> frozenset[str]:
        """The labels that identify the GPU, job, and counter of a series. Others are from Prometheus or the site."""
        named = {self.uuid_label, self.model_label, self.job_label, "__name__", "userid"}
        return frozenset({*named, self.mig_label, self.profile_label, *self.host_labels, *self.gpu_labels})

    def counters(self) -> dict[str, Counter]:
        """The counters that it has, by its own name."""
        return {self.metric(counter): counter for counter in COUNTERS if self.metric(counter)}


EXPORTERS = {
    exporter.name: exporter
    for exporter in (
        Exporter("dcgm", ("Hostname", "hostname"), ("gpu",), "UUID", "modelName", "hpc_job", total_is_free=True),
        Exporter(
            "jobstats",
            ("instance",),
            ("minor_number", "ordinal"),
            "uuid",
            "name",
            "jobid",
            job_metric="nvidia_gpu_jobId",
        ),
    )
}

FILE = Exporter("file", ("host",), ("gpu",), "uuid", "model", "job_label", mig_label="mig", profile_label="mig_profile")
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
    host = _first(labels, exporter.host_labels)
    return _without_port(host) if exporter.name == "jobstats" else host


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
