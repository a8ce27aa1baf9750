"""Ask a Prometheus server for `almanac doctor`: the counters it has lately, on which GPUs, and what is wrong.

Counting is left to the server: answers hold a number per counter, host and GPU model, and no samples.
"""

from __future__ import annotations

import time
from collections import Counter as Tally
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from almanac.config import Prometheus
from almanac.errors import ServerError
from almanac.records import Counts
from telemetry.counters import COUNTERS, ERRORS, Counter
from telemetry.sources.exporters import Metric, exporter_of, exporters
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus import GpuQueries, over
from telemetry.sources.prometheus_json import Point
from telemetry.sources.prometheus_server import PrometheusServer, TooMuchError
from telemetry.sources.series import UnusableSeriesError, host_of

PROBE_S = 600
BUSY_PCT = 50
_LOOKBACKS_S = (86_400, 3_600)
"""Spans in which a host that is silent now is looked for; the second if the server refuses the first."""

NEVER_ZERO = ("gr_engine_active_frac", "sm_active_frac", "dram_active_frac")
"""Counters that no busy GPU holds at exactly 0; a pipe that a program does not use is 0 for good reason."""

OF_CARD = frozenset(
    {"gpu_util_pct", "power_w", "energy_mj", "temp_c", "sm_clock_mhz", *ERRORS}
    | {f"{link}_{way}_bytes_s" for link in ("nvlink", "pcie") for way in ("tx", "rx")}
)
"""Counters of the whole card, which are not expected of its MIG instances."""


@dataclass(frozen=True, order=True)
class Group:
    """The GPUs of one model on one host, or the MIG instances of these GPUs. model: the exporter's name, or empty."""

    host: str
    model: str
    is_mig: bool = False


@dataclass(frozen=True)
class CounterStatus:
    """The GPUs that have a counter. units: by group that should have it, the GPUs that have it, and all GPUs.

    metric: the name that switches it on. stuck_hosts: hosts on which it read 0 all the time on a GPU whose mean
    GPU_UTIL was BUSY_PCT or more.
    """

    metric: Metric
    counter: Counter
    units: Mapping[Group, tuple[int, int]]
    stuck_hosts: tuple[str, ...] = ()

    @property
    def present(self) -> int:
        return sum(present for present, _ in self.units.values())

    @property
    def expected(self) -> int:
        return sum(expected for _, expected in self.units.values())

    @property
    def hosts_without(self) -> tuple[str, ...]:
        """Hosts on which at least one GPU lacks it."""
        return tuple(sorted({group.host for group, (present, expected) in self.units.items() if present < expected}))

    @property
    def by_model(self) -> dict[str, tuple[int, int]]:
        """GPUs that have it, and all, of each model."""
        models = sorted({group.model for group in self.units})
        mine = {name: [both for group, both in self.units.items() if group.model == name] for name in models}
        return {name: (sum(p for p, _ in found), sum(e for _, e in found)) for name, found in mine.items()}


@dataclass(frozen=True, order=True)
class Silence:
    """A host without any sample now that had some within the last day. up: Prometheus' own word on its target, None
    where that is no target any more."""

    host: str
    instance: str
    up: bool | None


@dataclass(frozen=True)
class Nothing:
    """Data of a server without GPUs that the selector finds. unselected: counters by exporter, whatever the selector.
    others: names of the exporter's metrics that are no counters; those that the selector hides only if there are no
    counters anywhere. targets, down: the number of targets that Prometheus scrapes, and of those that are down.
    """

    unselected: Mapping[str, int]
    others: tuple[str, ...]
    targets: int
    down: int


@dataclass(frozen=True)
class ForbiddenValue:
    """A value that the unit of its metric forbids, as the metric gives it; its limits, low and high; on which hosts."""

    metric: str
    value: float
    limits: tuple[float, float]
    hosts: tuple[str, ...]


@dataclass(frozen=True)
class PrometheusStatus:
    """The GPU data of a Prometheus server in the last PROBE_S seconds.

    unusable: series by the reason for which they belong to no host. scrape_interval_s is None if no GPU has two
    samples; version is empty if unknown. nothing: only if there is no series. releases: hosts by the exporter's release
    that brought the names they use. unknown: the exporter's metrics that almanac does not know.
    """

    version: str
    groups: Mapping[Group, int]
    counters: tuple[CounterStatus, ...]
    scrape_interval_s: float | None
    silent: tuple[Silence, ...]
    unusable: Mapping[str, int]
    nothing: Nothing | None
    releases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    forbidden: tuple[ForbiddenValue, ...] = ()

    @property
    def hosts(self) -> int:
        return len({group.host for group in self.groups})

    @property
    def gpus(self) -> int:
        """Whole GPUs."""
        return sum(number for group, number in self.groups.items() if not group.is_mig)

    @property
    def instances(self) -> int:
        """MIG instances."""
        return sum(number for group, number in self.groups.items() if group.is_mig)


def probe(config: Prometheus, *, clock: Callable[[], float] = time.time) -> PrometheusStatus:
    """Ask once, without retries, what is there. Raises ServerError where nothing answers, ConfigError."""
    server = PrometheusServer(replace(config, retries=0), clock=clock)
    version = server.version()
    asked = _Probe(GpuQueries(server, exporter_of(config), config.selector), config, int(clock()))
    try:
        held, unusable = asked.held()
        groups = {group: max(metrics.values()) for group, metrics in held.items()}
        return PrometheusStatus(
            version=version,
            groups=groups,
            counters=asked.counters(held, groups),
            scrape_interval_s=asked.interval_s(held),
            silent=asked.silent(),
            unusable=unusable,
            nothing=None if groups or unusable else asked.nothing(),
            releases=asked.releases(held),
            unknown=asked.unknown(),
            forbidden=asked.forbidden() if groups else (),
        )
    except TooMuchError as error:
        raise ServerError(
            f"Prometheus at {server.address} refuses ten minutes of one counter: {error}",
            "raise Prometheus' --query.max-samples and --query.timeout, or narrow prometheus.selector",
        ) from error


@dataclass(frozen=True)
class _Probe:
    """The questions about the PROBE_S seconds before end_s. All raise ServerError and TooMuchError."""

    queries: GpuQueries
    config: Prometheus
    end_s: int

    @property
    def _recent(self) -> str:
        return over(self.end_s - PROBE_S, self.end_s)

    def _ask(self, query: str, what: str) -> list[Point]:
        return self.queries.server.vector(query, self.end_s, what)

    def _host(self, point: Point) -> str:
        return host_of(point.labels, self.queries.exporter, self.config.host_suffix)

    def held(self) -> tuple[dict[Group, Tally[str]], Tally[str]]:
        """Count the GPUs of each group that have each metric; and series that belong to no host, by reason."""
        exporter = self.queries.exporter
        kept = ["__name__", *exporter.host_labels, *exporter.model_labels]
        unit = ", ".join([*kept, *exporter.gpu_labels, *exporter.info_labels, exporter.mig_label])
        held: dict[Group, Tally[str]] = {}
        unusable: Tally[str] = Tally()
        for is_mig, sign in ((False, "="), (True, "!=")):
            series = self.queries.everything(f'{exporter.mig_label}{sign}""')
            # A GPU has a series per job under the exporter's job label: the inner count makes it one.
            query = f"count by ({', '.join(kept)}) (count by ({unit}) (last_over_time({series}{self._recent})))"
            what = "which GPUs have which counters"
            for found in self._ask(query, what):
                number, labels = self.queries.server.whole(found, what), found.labels
                try:
                    models = (labels[name] for name in exporter.model_labels if labels.get(name))
                    group = Group(self._host(found), next(models, ""), is_mig)
                except UnusableSeriesError as error:
                    unusable[str(error)] += number
                else:
                    held.setdefault(group, Tally())[labels.get("__name__", "")] += number
        return held, unusable

    def counters(
        self, held: Mapping[Group, Mapping[str, int]], groups: Mapping[Group, int]
    ) -> tuple[CounterStatus, ...]:
        """Every counter of the exporter; none where there is no GPU."""
        if not groups:
            return ()
        exporter = self.queries.exporter
        names = {counter: exporter.names_of(counter.column) for counter in COUNTERS}
        return tuple(
            CounterStatus(
                exporter.main(counter.column),
                counter,
                {
                    group: (max(held[group].get(metric.name, 0) for metric in metrics), number)
                    for group, number in groups.items()
                    if any(metric.name in held[group] for metric in metrics) or self._is_expected(group, counter)
                },
                self._stuck([metric for metric in metrics if any(metric.name in found for found in held.values())])
                if counter.column in NEVER_ZERO
                else (),
            )
            for counter, metrics in names.items()
            if metrics
        )

    def releases(self, held: Mapping[Group, Mapping[str, int]]) -> dict[str, tuple[str, ...]]:
        """Hosts by the release of the exporter that brought the names they use; the oldest names have none."""
        found: dict[str, set[str]] = {}
        for metric in self.queries.exporter.metrics:
            if metric.since:
                hosts = {group.host for group, names in held.items() if metric.name in names}
                found.setdefault(metric.since, set()).update(hosts)
        return {release: tuple(sorted(hosts)) for release, hosts in found.items() if hosts}

    def unknown(self) -> tuple[str, ...]:
        """The exporter's metrics that almanac does not know; none if the server refuses to look."""
        try:
            found = self.queries.others(self.end_s - PROBE_S, self.end_s)
        except TooMuchError:
            return ()
        return tuple(self.queries.exporter.unknown(found))

    def forbidden(self) -> tuple[ForbiddenValue, ...]:
        """Metrics whose lowest or highest value on a host their unit forbids; none if the server refuses to look."""
        # The functions over time drop the name of a metric, so a label has to keep it. Of a server that has just
        # started, no step of the subquery may have a sample, but the last sample is there.
        now, last = (
            f'label_replace({of}, "metric", "$1", "__name__", "(.+)")'
            for of in (self.queries.everything(), f"last_over_time({self.queries.everything()}{self._recent})")
        )
        by = ", ".join(["metric", *self.queries.exporter.host_labels])
        try:
            low, high = (
                self._ask(
                    f"{way} by ({by}) ({way}_over_time({now}[{PROBE_S}s:60s]) or {last})", f"the {way} of counters"
                )
                for way in ("min", "max")
            )
        except TooMuchError:
            return ()
        hosts: dict[str, set[str]] = {}
        examples: dict[str, float] = {}
        for point, is_low in [*((point, True) for point in low), *((point, False) for point in high)]:
            metric = self.queries.exporter.named.get(point.labels.get("metric", ""))
            if metric and metric.forbids(point.value, is_low):
                hosts.setdefault(metric.name, set()).update(self._hosts([point]))
                examples[metric.name] = point.value
        return tuple(
            ForbiddenValue(name, examples[name], self.queries.exporter.named[name].limits, tuple(sorted(found)))
            for name, found in hosts.items()
        )

    def _is_expected(self, group: Group, counter: Counter) -> bool:
        """The jobstats exporter shows engine activity from Hopper on, and almanac needs it only for MIG instances."""
        if group.is_mig:
            return counter.column not in OF_CARD
        return self.queries.exporter.name != "jobstats" or counter.column != "gr_engine_active_frac"

    def _stuck(self, metrics: Sequence[Metric]) -> tuple[str, ...]:
        queries, exporter = self.queries, self.queries.exporter
        hosts = ", ".join(exporter.host_labels)
        gpu = ", ".join([*exporter.host_labels, *exporter.gpu_keys])
        busy = " or ".join(
            f"max by ({gpu}) (avg_over_time({queries.of(util)}{self._recent})) >= {BUSY_PCT / util.scale:g}"
            for util in exporter.names_of("gpu_util_pct")
        )
        found: set[str] = set()
        for metric in metrics if busy else ():
            values = f"max by ({gpu}) (max_over_time({queries.of(metric)}{self._recent})) == 0"
            query = f"count by ({hosts}) ({values} and on ({gpu}) ({busy}))"
            found.update(self._hosts(self._ask(query, f"where {metric.name} is 0 on busy GPUs")))
        return tuple(sorted(found))

    def _hosts(self, found: list[Point]) -> tuple[str, ...]:
        names = set()
        for series in found:
            try:
                names.add(self._host(series))
            except UnusableSeriesError:
                continue
        return tuple(sorted(names))

    def interval_s(self, held: Mapping[Group, Mapping[str, int]]) -> float | None:
        """The median over GPUs of the median gap between samples, of the first counter that is there."""
        present = {metric for metrics in held.values() for metric in metrics}
        pivot = Pivot(
            self.queries.exporter, self.config.host_suffix, (self.end_s - PROBE_S) * 1000, self.end_s * 1000, Counts()
        )
        metric = next((metric for metric in self.queries.exporter.metrics if metric.name in present), None)
        if metric:
            samples = self.queries.samples(self.queries.of(metric), self.end_s - PROBE_S, self.end_s)
            info = self.queries.info(self.end_s - PROBE_S, self.end_s)
            self.queries.name_gpus(samples, info)
            pivot.add(metric, samples)
        gaps_s = pivot.median_gaps_s()
        return float(np.median(gaps_s)) if len(gaps_s) else None

    def silent(self) -> tuple[Silence, ...]:
        """Hosts that fell silent; none where the server refuses to look back."""
        exporter = self.queries.exporter
        used = "|".join(metric.name for metric in exporter.names_of("hbm_used_mib"))
        selector = self.queries.matching("", f'__name__=~"{used}"')
        hosts = ", ".join(exporter.host_labels)
        labels = ", ".join(sorted({*exporter.host_labels, "job", "instance"}))
        for lookback_s in _LOOKBACKS_S:
            before = f"last_over_time({selector}{over(self.end_s - lookback_s, self.end_s)})"
            now = f"last_over_time({self.queries.everything()}{self._recent})"
            query = f"group by ({labels}) ({before}) unless on ({hosts}) group by ({hosts}) ({now})"
            try:
                return self._silences(self._ask(query, "which hosts fell silent"), before)
            except TooMuchError:
                continue
        return ()

    def _silences(self, found: list[Point], before: str) -> tuple[Silence, ...]:
        if not found:
            return ()
        query = f"max by (job, instance) (up) and on (job, instance) group by (job, instance) ({before})"
        targets = {
            (target.labels.get("job", ""), target.labels.get("instance", "")): target.value > 0
            for target in self._ask(query, "whether the silent targets are up")
        }
        silences = set()
        for series in found:
            instance = series.labels.get("instance", "")
            try:
                silences.add(
                    Silence(self._host(series), instance, targets.get((series.labels.get("job", ""), instance)))
                )
            except UnusableSeriesError:
                continue
        return tuple(sorted(silences, key=lambda silence: (silence.host, silence.instance)))

    def nothing(self) -> Nothing:
        """Name the data that the server has instead of the counters that were looked for."""
        unselected: dict[str, int] = {}
        for exporter in exporters(self.config.own_names).values():
            every = f'{{__name__=~"{"|".join(exporter.named)}"}}'
            unselected[exporter.name] = self._number(f"count(last_over_time({every}{self._recent}))")
        others = self._others(self.queries)
        if not others and not any(unselected.values()):
            others = self._others(replace(self.queries, selector=""))
        return Nothing(unselected, others, self._number("count(up)"), self._number("count(up == 0)"))

    def _others(self, queries: GpuQueries) -> tuple[str, ...]:
        span = (self.end_s - PROBE_S, self.end_s)
        return tuple(queries.others(*span) or queries.others(*span, by_labels=True))

    def _number(self, query: str) -> int:
        return self.queries.server.number(query, self.end_s, "what there is at all")
