"""Exporters of GPU counters: the names, units, and labels of their series, and dcgm-exporter's CSV.

An exporter is a file in telemetry/exporters/, or a table [prometheus_names.NAME] of almanac.toml with the same keys.
The CSV tells dcgm-exporter what to export (--collectors, -f): `DCGM field, Prometheus type, help`. dcgm-exporter
refuses a whole file in which one record has not three fields, and skips, with a warning, profiling fields that a GPU
does not have.
"""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

import msgspec

from almanac.config import Prometheus
from almanac.config_file import refuse_unknown
from almanac.errors import ConfigError
from almanac.units import printable
from telemetry.counters import COUNTERS, LIVE, PARTS, Counter

_METRIC_NAME, _LABEL_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]{0,199}"), re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,99}")


@dataclass(frozen=True)
class Metric:
    """One name of a counter; docs/exporters.md explains the keys. where: labels that its series must have."""

    name: str
    counter: Counter
    scale: float = 1.0
    least: float = 0.0
    since: str = ""
    where: Mapping[str, str] = field(default_factory=dict)
    zero: bool = True
    default: bool = True
    listed: bool = True

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
    """Names and labels of one exporter, in the order of its file; docs/exporters.md explains the keys.

    live: metrics that only the watch reads.
    """

    name: str
    metrics: tuple[Metric, ...]
    host_labels: tuple[str, ...] = ("instance",)
    gpu_labels: tuple[str, ...] = ("gpu",)
    uuid_label: str = "uuid"
    model_labels: tuple[str, ...] = ()
    live: tuple[Metric, ...] = ()
    job_label: str = ""
    job_metric: str = ""
    job_flag: bool = False
    info_metric: str = ""
    info_labels: tuple[str, ...] = ()
    mig_label: str = "GPU_I_ID"
    profile_label: str = "GPU_I_PROFILE"
    other_labels: tuple[str, ...] = ()
    prefix: str = ""
    unused: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    source: str = ""
    verified: bool = True

    @cached_property
    def named(self) -> Mapping[str, Metric]:
        """Its metrics by name; of several with one name, the first."""
        first: dict[str, Metric] = {}
        for metric in self.metrics:
            first.setdefault(metric.name, metric)
        return first

    def names_of(self, column: str) -> tuple[Metric, ...]:
        """The metrics of a counter, or of the parts that it can be made up of."""
        wanted = {
            "hbm_total_mib": ("hbm_total_mib", "hbm_free_mib"), "hbm_used_mib": ("hbm_used_mib", "hbm_used_pct"),
        }.get(column, (column,))  # fmt: skip
        return tuple(metric for metric in self.metrics if metric.counter.column in wanted)

    def main(self, column: str) -> Metric:
        """The metric that switches a counter on: the one of our own list, else the first. Raises IndexError."""
        metrics = self.names_of(column)
        return next((metric for metric in metrics if metric.listed), metrics[0])

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The names, sorted, that are neither a counter's nor listed as unused."""
        return sorted(name for name in set(names) - self.named.keys() if not self.is_unused(name))

    def is_unused(self, name: str) -> bool:
        """True if the preset lists a metric as one that almanac does not need."""
        own = (self.job_metric, self.info_metric)
        return name in own or any(fnmatchcase(name, pattern) for pattern in ("*:*", *self.unused))  # *:*: recorded

    @property
    def gpu_keys(self) -> tuple[str, ...]:
        """The labels by which the series of a counter tell GPUs apart."""
        return self.info_labels or self.gpu_labels

    @property
    def own_labels(self) -> frozenset[str]:
        """The labels that identify the GPU, job, and counter of a series. Others are from Prometheus or the site."""
        where = {name for metric in self.metrics for name in metric.where}
        named = {self.uuid_label, self.job_label, "__name__", self.mig_label, self.profile_label}
        several = (*self.other_labels, *self.host_labels, *self.gpu_labels, *self.info_labels, *self.model_labels)
        return frozenset({*named, *where, *several})


def _exporter(name: str, given: Mapping[str, Any], where: str, others: Mapping[str, Exporter]) -> Exporter:
    """The exporter of a file or a table. Raises ConfigError, which names the key."""
    data, kinds = dict(given), typing.get_type_hints(Exporter)
    keys = [each.name for each in fields(Exporter) if each.name not in ("name", "metrics", "live")]
    refuse_unknown(data, [*keys, "extends", "counters"], f"{where}: unknown key")
    base, counters = data.pop("extends", None), data.pop("counters", {})
    if base is not None and base not in others:
        refuse_unknown({str(base): 0}, list(others), f"{where}: extends names no exporter:")
    if not isinstance(counters, dict):
        raise ConfigError(f"{where}: counters is {_shown(counters)}", "write a table [counters] of our columns")
    columns = {counter.column: counter for counter in (*COUNTERS, *PARTS, *LIVE)}
    refuse_unknown(counters, list(columns), f"{where}: unknown counter")
    own = [_metric(entry, columns[column], f"{where}: {column}") for column, entries in counters.items()
           for entry in (entries if isinstance(entries, list) else [entries])]  # fmt: skip
    inherited = others[base] if base is not None else None
    values = {key: _typed(value, kinds[key], f"{where}: {key}") for key, value in data.items()}
    if inherited:
        kept = [metric for metric in (*inherited.metrics, *inherited.live) if metric.counter.column not in counters]
        values = {key: getattr(inherited, key) for key in keys} | {"verified": False} | values
        own = [*own, *kept]
    for key in keys:
        if key.endswith(("_label", "_labels")):
            labels = values.get(key, ())
            for label in labels if isinstance(labels, tuple) else filter(None, [labels]):
                _require(_LABEL_NAME, label, f"{where}: {key}", "the name of a label")
    if not own:
        raise ConfigError(f"{where} has no counters", f"name one, such as counters.{COUNTERS[0].column}")
    live = tuple(metric for metric in own if metric.counter in LIVE)
    return Exporter(name=name, metrics=tuple(metric for metric in own if metric not in live), live=live, **values)


def _metric(entry: Any, counter: Counter, where: str) -> Metric:
    """One name of a counter: a text, or a table of the keys of Metric."""
    table = {"name": entry} if isinstance(entry, str) else entry
    if not isinstance(table, dict) or "name" not in table:
        raise ConfigError(f"{where} is {_shown(entry)}", 'write [{ name = "the metric", scale = 1.0 }]')
    kinds = {key: kind for key, kind in typing.get_type_hints(Metric).items() if key != "counter"}
    refuse_unknown(table, list(kinds), f"{where}: unknown key")
    values = {key: _typed(value, kinds[key], f"{where}.{key}") for key, value in table.items()}
    _require(_METRIC_NAME, values["name"], f"{where}.name", "the name of a metric")
    for label in values.get("where", {}):
        _require(_LABEL_NAME, label, f"{where}.where", "the name of a label")
    if not 0 < values.get("scale", 1.0) < float("inf"):
        raise ConfigError(f"{where}.scale is {values['scale']}", "write the factor into our unit, above 0")
    return Metric(counter=counter, **values)


def _typed(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} is {_shown(value)}: {error}", "see docs/exporters.md") from error


def _require(form: re.Pattern[str], text: str, where: str, what: str) -> None:
    if not form.fullmatch(text):
        raise ConfigError(
            f"{where} is {_shown(text)}, expected {what}", "letters, digits, and _, as the exporter has it"
        )


def _shown(value: Any) -> str:
    return printable(repr(value), 80)


@cache
def presets() -> Mapping[str, Exporter]:
    """Every exporter that almanac knows, by name."""
    folder, found = files("telemetry") / "exporters", dict[str, Exporter]()
    texts = {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in folder.iterdir()
             if entry.name.endswith(".toml")}  # fmt: skip
    tables = {name: tomllib.loads(text) for name, text in sorted(texts.items())}
    for name in sorted(tables, key=lambda name: ("extends" in tables[name], name)):
        found[name] = _exporter(name, tables[name], f"telemetry/exporters/{name}.toml", found)
    return found


def exporters(own: Mapping[str, Any]) -> Mapping[str, Exporter]:
    """The presets, and the site's own tables [prometheus_names.NAME]. Raises ConfigError."""
    found = dict(presets())
    for name, table in own.items():
        where = f"[prometheus_names.{printable(name, 40)}]"
        if name in presets():
            raise ConfigError(f"{where}: a preset has this name", f'give it another, with extends = "{name}"')
        if not isinstance(table, dict):
            raise ConfigError(f"{where} is {_shown(table)}", "write a table of its keys")
        found[name] = _exporter(name, table, where, found)
    return found


def exporter_of(config: Prometheus) -> Exporter:
    """The exporter whose names a server has. Raises ConfigError."""
    found = exporters(config.own_names)
    refuse_unknown({config.names: 0}, list(found), f"{config.place}names: no preset or table is named")
    return found[config.names]


FILE = Exporter(
    "file",
    tuple(Metric(counter.column, counter) for counter in COUNTERS),
    ("host",),
    uuid_label="uuid",
    model_labels=("model",),
    job_label="job_label",
    mig_label="mig",
    profile_label="mig_profile",
)
"""A file to import: labels and counters have the names and units of the store."""


FILES = {"almanac-counters.csv": False, "almanac-counters-basic.csv": True}
"""The files of slurm_hooks/exporter, and whether each leaves out the profiling fields."""

_HEAD = """# What almanac reads of dcgm-exporter (--collectors FILE), with the defaults of the exporter.
# Written by docs/generate.py from telemetry/exporters/dcgm.toml; docs/counters.md says how to install it.
# DCGM field, Prometheus metric type, help message
"""
_DRIVER = "# From the driver: every GPU that DCGM supports"
_KEPT = "# The exporter's own defaults that almanac does not read"
_PROFILING = "# Profiling fields: data-centre GPUs from Volta on, and CAP_SYS_ADMIN; what a GPU lacks is skipped"


def csv_line(metric: Metric) -> str:
    """The record that switches a metric on. Commas and quotes would be syntax, so the help has none."""
    counter = metric.counter
    kind = "counter" if counter.is_cumulative else "gauge"
    about = counter.about.replace(",", ";").replace('"', "'")
    return f"{metric.name}, {kind}, {about[0].upper()}{about[1:]} ({counter.unit})."


def csv_text(*, is_basic: bool = False) -> str:
    """The whole file. is_basic: without the profiling fields."""
    listed = [metric for metric in presets()["dcgm"].metrics if metric.listed]
    kept = [line for line in presets()["dcgm"].kept if line.partition(",")[0] not in {one.name for one in listed}]
    lines = [_HEAD, _DRIVER, *(csv_line(metric) for metric in listed if not metric.is_profiling), "", _KEPT, *kept]
    if not is_basic:
        lines += ["", _PROFILING, *(csv_line(metric) for metric in listed if metric.is_profiling)]
    return "\n".join([*lines, ""])
