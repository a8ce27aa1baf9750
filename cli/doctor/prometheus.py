"""`almanac doctor` on Prometheus: the GPU counters that it has, and whether it and Slurm know the same hosts."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from almanac.config import Prometheus
from almanac.errors import AlmanacError
from almanac.units import counted, listed, printable
from cli.app import App
from cli.doctor import Check
from slurm.hostlist import fold
from slurm.nodes import node_hosts
from telemetry.attribution.allocations import match_hosts
from telemetry.counters import COUNTERS, JOB_METRICS
from telemetry.sources.exporters import Exporter, csv_line, exporter_of, exporters
from telemetry.sources.prometheus_probe import probe

if TYPE_CHECKING:
    from slurm.nodes import NodeHost
    from telemetry.sources.prometheus_probe import (
        CounterStatus,
        ForbiddenValue,
        Nothing,
        PrometheusStatus,
        Silence,
    )

GPU_COUNTERS, HOSTS = "GPU counters", "host names"
ESSENTIAL = ("gpu_util_pct", "hbm_used_mib", "hbm_total_mib")
"""Counters without which there is no advice."""

_SHOWN = 4
_TODO_UNKNOWN = "give the exporter almanac's own list (docs/counters.md), or update almanac, which may know these names"


def check_prometheus(app: App) -> Iterator[Check]:
    servers = app.config.prometheus.servers
    if not servers:
        yield Check("Prometheus", "warn", "not configured", "set prometheus.url, or import telemetry files")
        return
    exporters(app.config.prometheus.own_names)
    found: dict[str, set[str]] = {}
    for config in servers:
        of = f" of {config.name or 'prometheus'}" if len(servers) > 1 else ""
        try:
            status = probe(config)
        except AlmanacError as error:
            if len(servers) == 1:
                raise
            yield Check(f"Prometheus{of}", "fail", str(error), error.hint)
            continue
        yield Check(f"Prometheus{of}", "ok", f"version {status.version or 'unknown'} answers")
        for check in check_counters(status, config):
            yield replace(check, name=check.name + of)
        found[config.source_name] = {group.host for group in status.groups}
        found[config.source_name] |= {one.host for one in status.silent}
    yield from _twice(found)
    yield from check_hosts(app, set().union(*found.values()))


def _twice(found: Mapping[str, Collection[str]]) -> Iterator[Check]:
    """Hosts that several servers have: the first one gives their counters."""
    first = dict[str, str]()
    for server, hosts in found.items():
        both = sorted(host for host in hosts if host in first)
        if both:
            said = (
                f"{listed(both, 'host')} of {server} {_is(both)} also in {first[both[0]]}, which comes first and counts"
            )
            yield Check(HOSTS, "warn", said, "say with nodes or partitions which server is read for them",
                        {"hosts": both, "server": server})  # fmt: skip
        first |= {host: server for host in hosts if host not in first}


def check_counters(status: PrometheusStatus, config: Prometheus) -> Iterator[Check]:
    """Each counter that is missing or stuck: on which hosts, what is lost, and the fix."""
    for reason, number in status.unusable.items():
        yield Check(GPU_COUNTERS, "warn" if status.groups else "fail", f"{number} series belong to no host: {reason}",
                    "run dcgm-exporter without --no-hostname, and scrape it with honor_labels")  # fmt: skip
    if status.nothing is not None:
        yield _nothing(status.nothing, status.silent, config)
        return
    exporter = exporter_of(config)
    if status.groups:
        yield _overview(status, exporter)
    if status.unknown:
        yield _unknown(status.unknown, exporter)
    if not status.groups:
        return
    for value in status.forbidden:
        yield _forbidden(value)
    if status.silent:
        yield _silent(status.silent)
    units = 0 if _is_dcgm(exporter) else status.gpus + status.instances
    absent = [each for each in status.counters if not each.present and each.expected == units]
    absent = [each for each in absent if each.counter.column not in ESSENTIAL]
    if absent:
        yield _absent(absent, exporter)
    for counter in status.counters:
        if counter.present < counter.expected and counter not in absent:
            yield _off(counter, exporter)
        if counter.stuck_hosts:
            yield _stuck(counter)
    yield from _never(exporter)


def _is_dcgm(exporter: Exporter) -> bool:
    """Return True if dcgm-exporter's CSV decides what the exporter has."""
    return exporter.prefix == "DCGM_"


def _overview(status: PrometheusStatus, exporter: Exporter) -> Check:
    interval = "unknown" if status.scrape_interval_s is None else f"{status.scrape_interval_s:g} s"
    instances = f" and {status.instances} MIG instances" if status.instances else ""
    complete = sum(counter.present == counter.expected for counter in status.counters)
    said = f"{status.gpus} GPUs{instances} on {status.hosts} hosts, scrape interval {interval}"
    for release, hosts in status.releases.items():
        said += f", names of release {release} and newer on {'all' if len(hosts) == status.hosts else _hosts(hosts)}"
    found = f"{exporter.name}: {complete} of {len(status.counters)} counters on all of them"
    if not exporter.verified:
        found += "; this preset is unverified: it was written without a page of a real exporter"
    shares = {c.counter.column: {"gpus_with": c.present, "gpus": c.expected} for c in status.counters}
    return Check(GPU_COUNTERS, "ok", f"{said}, {found}",
                 details={"counters": shares, "preset": exporter.name, "verified": exporter.verified})  # fmt: skip


def _nothing(nothing: Nothing, silent: Sequence[Silence], config: Prometheus) -> Check:
    """Reason for the missing GPU series: hidden by the selector, from another exporter, stopped, or never there."""
    said = "no GPU series of the last 10 min"
    others = [name for name, number in nothing.unselected.items() if number and name != config.names]
    if nothing.others:
        return Check(GPU_COUNTERS, "fail", f"{said} has a counter that almanac knows; Prometheus has "
                     f"{listed(nothing.others, 'other metric', 20)}", _TODO_UNKNOWN,
                     {"other_metrics": list(nothing.others)})  # fmt: skip
    if nothing.unselected.get(config.names):
        number = nothing.unselected[config.names]
        return Check(GPU_COUNTERS, "fail", f"{said} match prometheus.selector; without it there are {number}",
                     f"correct prometheus.selector, now {config.selector!r}")  # fmt: skip
    if others:
        return Check(GPU_COUNTERS, "fail", f"{said} come from {config.names}; some come from {others[0]}",
                     f'set prometheus.names = "{others[0]}"')  # fmt: skip
    if silent:
        found = _silent(silent)
        return Check(GPU_COUNTERS, "fail", f"there are {said}; {found.said}", found.todo, found.details)
    scraped = f"Prometheus scrapes {nothing.targets} targets ({nothing.down} down), and none has GPU counters"
    todo = "install dcgm-exporter on the GPU nodes and add it to scrape_configs (docs/counters.md)"
    return Check(GPU_COUNTERS, "fail", f"there are no GPU series of the last day: {scraped}", todo)


def _unknown(names: Sequence[str], exporter: Exporter) -> Check:
    said = f"Prometheus has {listed(names, 'metric', 20)} of the exporter that almanac does not know"
    own = f"name them in counters, or in unused, of a table [prometheus_names.NAME] like {exporter.name}"
    todo = _TODO_UNKNOWN if _is_dcgm(exporter) else f"{own} (docs/exporters.md)"
    return Check(GPU_COUNTERS, "warn", said, todo, {"unknown_metrics": list(names)})


def _forbidden(found: ForbiddenValue) -> Check:
    low, high = found.limits
    return Check(
        GPU_COUNTERS,
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
    said = f"hosts with counters in the last day, but none for 10 min: {', '.join(parts)}"
    todo = "check the targets page of Prometheus, and on the host whether dcgm-exporter runs and what it logs"
    return Check(GPU_COUNTERS, "warn", said, todo, {"silent": [vars(item) for item in silent]})


def _absent(absent: Sequence[CounterStatus], exporter: Exporter) -> Check:
    """Counters that some set-ups of the exporter have, and this one does not."""
    names = [f"{status.counter.column} ({status.metric.name})" for status in absent]
    said = f"no GPU has {listed(names, 'counter', 20)} of {exporter.name}; they are null, not 0"
    todo = "switch them on in the exporter, if its GPUs have them (docs/exporters.md)"
    return Check(GPU_COUNTERS, "warn", said, todo, {"absent": [status.counter.column for status in absent]})


def _off(status: CounterStatus, exporter: Exporter) -> Check:
    counter = status.counter
    share = f"missing on all {status.expected} GPUs"
    if status.present:
        share = f"missing on {status.expected - status.present} of {status.expected} GPUs: {_where(status)}"
    is_fatal = counter.column in ESSENTIAL and not status.present
    said = f"{status.metric.name} is {share}; {_cost(status)}"
    todo = _remedy(status, exporter)
    return Check(GPU_COUNTERS, "fail" if is_fatal else "warn", said, todo, _details(status, exporter))


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


def _remedy(status: CounterStatus, exporter: Exporter) -> str:
    """Change after which the exporter gives a counter."""
    if exporter.name == "jobstats" and status.counter.column == "gr_engine_active_frac":
        return "update the jobstats exporter to 0.2.3 or newer; GPUs older than Hopper do not have this counter"
    if not _is_dcgm(exporter):
        return "check the selector of this server, and look for the metric on the exporter's own page"
    line = f'add the line "{csv_line(status.metric)}" to the CSV file of dcgm-exporter --collectors'
    if not status.metric.default:
        line += " (its own file has it commented out)"
    if not status.metric.is_profiling:
        return line
    models = [model or "unknown" for model, (present, _) in status.by_model.items() if not present]
    if status.present and models:
        return f"{line}; no {' and no '.join(models)} has it: run `dcgmi profile --list` there to see whether it can"
    return f"{line}; this needs a data-center GPU, Volta or newer, and dcgm-exporter with CAP_SYS_ADMIN"


def _details(status: CounterStatus, exporter: Exporter) -> dict[str, Any]:
    return {
        "counter": status.counter.column,
        "metric": status.metric.name,
        "gpus_with": status.present,
        "gpus": status.expected,
        "hosts_without": list(status.hosts_without),
        "models": {model: {"gpus_with": found[0], "gpus": found[1]} for model, found in status.by_model.items()},
        "null_without": list(_lost(status)),
        "csv_line": csv_line(status.metric) if _is_dcgm(exporter) else None,
    }


def _stuck(status: CounterStatus) -> Check:
    return Check(
        GPU_COUNTERS,
        "warn",
        f"{status.metric.name} reads 0 on busy GPUs of {_hosts(status.stuck_hosts)}: a profiling fault, not idleness",
        "restart DCGM and dcgm-exporter there; check whether a profiler (Nsight, CUPTI) holds the counters: "
        "`dcgmi profile --pause` and `--resume`",
        {"counter": status.counter.column, "metric": status.metric.name, "hosts_stuck": list(status.stuck_hosts)},
    )


def _never(exporter: Exporter) -> Iterator[Check]:
    """Counters that the exporter does not have at all."""
    lacking = [counter.column for counter in COUNTERS if not exporter.names_of(counter.column)]
    if lacking:
        lost = [what for what, column in (("class", "dram_active_frac"), ("energy", "energy_mj")) if column in lacking]
        said = f"the {exporter.name} exporter has no {', '.join(lacking)}"
        said += f": jobs have no {' and no '.join(lost)}" if lost else ": these are null, not 0"
        yield Check(GPU_COUNTERS, "warn", said, "see docs/counters.md for what each exporter has")


def _hosts(names: Sequence[str]) -> str:
    try:
        return fold(names)
    except ValueError:  # an IPv6 address, which no host list can hold
        return ", ".join(sorted(set(names)))


def check_hosts(app: App, hosts: Collection[str]) -> Iterator[Check]:
    """Compare the hosts of telemetry with Slurm's GPU nodes. Yields nothing if Slurm does not answer."""
    try:
        nodes = [node for node in node_hosts(app.commands) if node.has_gpus]
    except AlmanacError:
        return  # the check of Slurm reports it
    if not nodes or not hosts:
        return
    names = match_hosts(hosts, [node.name for node in nodes])
    known = {names.nodes.get(host, host) for host in hosts}
    silent = [node for node in nodes if node.is_up and node.name not in known]
    strange = sorted(set(hosts) - names.nodes.keys() - names.unclear - {node.name for node in nodes})
    if names.unclear:
        said = f"{listed(sorted(names.unclear), 'host')} may be one of several nodes, so their counters have no job"
        todo = "set prometheus.host_suffix to the domain of this cluster's nodes"
        yield Check(HOSTS, "warn", said, todo, {"unclear": sorted(names.unclear)})
    if silent:
        yield _without_counters(silent, strange)
    if strange:
        said = f"{listed(strange, 'host')} with GPU counters {_is(strange)} no GPU node of Slurm"
        todo = "narrow prometheus.selector to this cluster, or correct the exporter's host label"
        yield Check(HOSTS, "warn", said, todo, {"hosts": strange})
    if not (names.unclear or silent or strange):
        yield Check(HOSTS, "ok", f"Prometheus and Slurm know the same {counted(len(known), 'GPU node')}")


def _without_counters(silent: Sequence[NodeHost], strange: Collection[str]) -> Check:
    """GPU nodes without counters, and whether Slurm names their hosts differently."""
    names = [node.name for node in silent]
    said = f"no GPU counters from {listed(names, 'GPU node')} of Slurm"
    todo = "add the exporters of these nodes to Prometheus' scrape_configs"
    by_host = {node.host: node.name for node in silent if node.host != node.name}
    found = match_hosts(strange, by_host)
    meant = sorted({found.nodes.get(host, host) for host in strange} & by_host.keys())
    if meant:
        pairs = [f"{by_host[host]} has NodeHostName {host}" for host in meant]
        said += f"; {', '.join(printable(pair, 120) for pair in pairs[:_SHOWN])}"
        todo = "make the exporter's host label the NodeName, with relabel_configs in Prometheus"
    return Check(HOSTS, "warn", said, todo, {"nodes": names, "node_host_names": meant})


def _is(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
