"""The findings of `almanac doctor` about the GPU counters that Prometheus has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from almanac.config import ExporterName, Prometheus
from almanac.units import listed
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from telemetry.sources.prometheus_probe import (
        CounterStatus,
        ForbiddenValue,
        Nothing,
        PrometheusStatus,
        Silence,
    )

NAME = "GPU counters"
ESSENTIAL = ("gpu_util_pct", "hbm_used_mib", "hbm_total_mib")
"""Without one of these there is no advice."""

_SHOWN = 4
_TODO_UNKNOWN = "give the exporter almanac's own list (docs/counters.md), or update almanac, which may know these names"


def check_counters(status: PrometheusStatus, config: Prometheus) -> Iterator[Check]:
    """Each counter that is missing or stuck: on which hosts, what is lost, and the fix."""
    for reason, number in status.unusable.items():
        yield Check(NAME, "warn" if status.groups else "fail", f"{number} series belong to no host: {reason}",
                    "run dcgm-exporter without --no-hostname, and scrape it with honor_labels")  # fmt: skip
    if status.nothing is not None:
        yield _nothing(status.nothing, status.silent, config)
        return
    if status.groups:
        yield _overview(status)
    if status.unknown:
        yield _unknown(status.unknown)
    if not status.groups:
        return
    for value in status.forbidden:
        yield _forbidden(value)
    if status.silent:
        yield _silent(status.silent)
    for counter in status.counters:
        if counter.present < counter.expected:
            yield _off(counter, config.exporter)
        if counter.stuck_hosts:
            yield _stuck(counter)
    yield from _never(config.exporter)


def _overview(status: PrometheusStatus) -> Check:
    interval = "unknown" if status.scrape_interval_s is None else f"{status.scrape_interval_s:g} s"
    instances = f" and {status.instances} MIG instances" if status.instances else ""
    complete = sum(counter.present == counter.expected for counter in status.counters)
    said = f"{status.gpus} GPUs{instances} on {status.hosts} hosts, scrape interval {interval}"
    for release, hosts in status.releases.items():
        said += f", names of release {release} and newer on {'all' if len(hosts) == status.hosts else _hosts(hosts)}"
    shares = {c.counter.column: {"gpus_with": c.present, "gpus": c.expected} for c in status.counters}
    return Check(NAME, "ok", f"{said}, {complete} of {len(status.counters)} counters on all of them",
                 details={"counters": shares})  # fmt: skip


def _nothing(nothing: Nothing, silent: Sequence[Silence], config: Prometheus) -> Check:
    """Why there is no GPU series: hidden by the selector, from another exporter, stopped, or never there."""
    said = "no GPU series of the last 10 min"
    others = [name for name, number in nothing.unselected.items() if number and name != config.exporter]
    if nothing.others:
        return Check(NAME, "fail", f"{said} has a counter that almanac knows; Prometheus has "
                     f"{listed(nothing.others, 'other metric', 20)}", _TODO_UNKNOWN,
                     {"other_metrics": list(nothing.others)})  # fmt: skip
    if nothing.unselected.get(config.exporter):
        number = nothing.unselected[config.exporter]
        return Check(NAME, "fail", f"{said} match prometheus.selector; without it there are {number}",
                     f"correct prometheus.selector, now {config.selector!r}")  # fmt: skip
    if others:
        return Check(NAME, "fail", f"{said} come from {config.exporter}; some come from {others[0]}",
                     f'set prometheus.exporter = "{others[0]}"')  # fmt: skip
    if silent:
        found = _silent(silent)
        return Check(NAME, "fail", f"there are {said}; {found.said}", found.todo, found.details)
    return Check(NAME, "fail", f"there are no GPU series of the last day: Prometheus scrapes {nothing.targets} targets "
                 f"({nothing.down} down), and none has GPU counters",
                 "install dcgm-exporter on the GPU nodes and add it to scrape_configs (docs/counters.md)")  # fmt: skip


def _unknown(names: Sequence[str]) -> Check:
    said = f"Prometheus has {listed(names, 'metric', 20)} of the exporter that almanac does not know"
    return Check(NAME, "warn", said, _TODO_UNKNOWN, {"unknown_metrics": list(names)})


def _forbidden(found: ForbiddenValue) -> Check:
    low, high = found.limits
    return Check(
        NAME,
        "warn",
        f"unit mismatch: {found.metric} has the value {found.value:.7g} on {_hosts(found.hosts)}, its unit allows "
        f"{low:.7g} to {high:.7g}; almanac drops such values",
        "compare the exporter's unit with docs/counters.md, and look for a recording or relabeling rule",
        {"metric": found.metric, "value": found.value, "limits": [low, high], "hosts": list(found.hosts)},
    )


def _silent(silent: Sequence[Silence]) -> Check:
    """Hosts that had counters within the last day and have none now, by the state of their targets."""
    kinds = {False: "down", True: "up, but without GPU counters", None: "no longer a target"}
    parts = [
        f"{_hosts([item.host for item in silent if item.up is up])} ({kind})"
        for up, kind in kinds.items()
        if any(item.up is up for item in silent)
    ]
    return Check(
        NAME,
        "warn",
        f"hosts with counters in the last day, but none for 10 min: {', '.join(parts)}",
        "check the targets page of Prometheus, and on the host whether dcgm-exporter runs and what it logs",
        {"silent": [vars(item) for item in silent]},
    )


def _off(status: CounterStatus, exporter: ExporterName) -> Check:
    counter = status.counter
    share = f"missing on all {status.expected} GPUs"
    if status.present:
        share = f"missing on {status.expected - status.present} of {status.expected} GPUs: {_where(status)}"
    is_fatal = counter.column in ESSENTIAL and not status.present
    return Check(
        NAME,
        "fail" if is_fatal else "warn",
        f"{status.metric.name} is {share}; {_cost(status)}",
        _remedy(status, exporter),
        _details(status, exporter),
    )


def _where(status: CounterStatus) -> str:
    """Hosts and models that lack a counter: "n[3-4] (A100: 8 of 16 have it; L4: none of 2)"."""
    shares = [
        f"{model or 'unknown model'}: {present or 'none'} of {number} {'has' if number == 1 else 'have'} it"
        for model, (present, number) in status.by_model.items()
        if present < number
    ]
    return f"{_hosts(status.hosts_without)} ({'; '.join(shares)})"


def _lost(status: CounterStatus) -> tuple[str, ...]:
    """Job metrics that are null without it. On MIG instances GR_ENGINE_ACTIVE stands in for GPU_UTIL."""
    from telemetry.counters import COUNTERS
    from telemetry.metrics.catalogue import JOB_METRICS

    lost = status.counter.feeds
    lacking = [group for group, (present, expected) in status.units.items() if present < expected]
    if status.counter.column == "gr_engine_active_frac" and any(group.is_mig for group in lacking):
        lost = next(counter.feeds for counter in COUNTERS if counter.column == "gpu_util_pct") + lost
    mean = f"mean_{status.counter.column}"
    return (*lost, mean) if mean in JOB_METRICS.names else lost


def _cost(status: CounterStatus) -> str:
    lost = _lost(status)
    if not lost:  # hbm_total_mib
        return "without it, GPU models that almanac does not know have no capacity"
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    return f"without it, {', '.join(lost[:_SHOWN])}{more} {'is' if len(lost) == 1 else 'are'} null"


def _remedy(status: CounterStatus, exporter: ExporterName) -> str:
    """What to change so that the exporter gives a counter."""
    if exporter != "dcgm" and status.counter.column == "gr_engine_active_frac":
        return "update the jobstats exporter to 0.2.3 or newer; GPUs older than Hopper do not have this counter"
    if exporter != "dcgm":
        return "check prometheus.selector: the exporter has it for every GPU without MIG"
    from telemetry.sources.exporter_csv import csv_line

    line = f'add the line "{csv_line(status.metric)}" to the CSV file of dcgm-exporter --collectors'
    if not status.metric.is_default:
        line += " (its own file has it commented out)"
    if not status.metric.is_profiling:
        return line
    models = [model or "unknown" for model, (present, _) in status.by_model.items() if not present]
    if status.present and models:
        return f"{line}; no {' and no '.join(models)} has it: run `dcgmi profile --list` there to see whether it can"
    return f"{line}; this needs a data-center GPU, Volta or newer, and dcgm-exporter with CAP_SYS_ADMIN"


def _details(status: CounterStatus, exporter: ExporterName) -> dict[str, Any]:
    from telemetry.sources.exporter_csv import csv_line

    return {
        "counter": status.counter.column,
        "metric": status.metric.name,
        "gpus_with": status.present,
        "gpus": status.expected,
        "hosts_without": list(status.hosts_without),
        "models": {model: {"gpus_with": found[0], "gpus": found[1]} for model, found in status.by_model.items()},
        "null_without": list(_lost(status)),
        "csv_line": csv_line(status.metric) if exporter == "dcgm" else None,
    }


def _stuck(status: CounterStatus) -> Check:
    return Check(
        NAME,
        "warn",
        f"{status.metric.name} reads 0 on busy GPUs of {_hosts(status.stuck_hosts)}: a profiling fault, not idleness",
        "restart DCGM and dcgm-exporter there; check whether a profiler (Nsight, CUPTI) holds the counters: "
        "`dcgmi profile --pause` and `--resume`",
        {"counter": status.counter.column, "metric": status.metric.name, "hosts_stuck": list(status.stuck_hosts)},
    )


def _never(exporter: ExporterName) -> Iterator[Check]:
    """Counters that the exporter does not have at all."""
    from telemetry.counters import COUNTERS
    from telemetry.sources.exporters import presets

    lacking = [counter.column for counter in COUNTERS if not presets()[exporter].names_of(counter.column)]
    if lacking:
        said = f"the {exporter} exporter has no {', '.join(lacking)}: jobs have no class and no energy"
        yield Check(NAME, "warn", said,
                    "run dcgm-exporter instead if you want these (docs/counters.md)")  # fmt: skip


def _hosts(names: Sequence[str]) -> str:
    from telemetry.slurm.hostlist import fold

    try:
        return fold(names)
    except ValueError:  # an IPv6 address, which no host list can hold
        return ", ".join(sorted(set(names)))
