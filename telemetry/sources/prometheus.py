"""Raw samples of a Prometheus server as rows of the telemetry table, and the queries for them.

Range selectors in instant queries give samples as they were scraped; query_range would resample them. A selector's
left border is closed in Prometheus 2 and open in 3, so each one starts 1 ms early: the reader cuts off what lies
outside [start, end), and every sample belongs to exactly one span on either.
"""

from __future__ import annotations

import datetime as dt
import json
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from almanac.config import Prometheus
from almanac.errors import ConfigError, ServerError, SourceError
from almanac.records import Counts
from almanac.units import DAY_S, HOUR_S, listed, printable
from slurm.hostlist import expand
from telemetry.sources.exporters import Exporter, Metric, exporter_of
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.sources.prometheus_server import PrometheusServer, TooMuchError
from telemetry.sources.series import UnusableSeriesError, host_of, short_host
from telemetry.sources.shared_nodes import SharedNodes
from telemetry.sources.source import RowBatch
from telemetry.store.schema import TELEMETRY

MOST_HOSTS = 200
"""Hosts that a query names. It goes into an address, which servers take up to some 8,000 characters."""
_NODE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class GpuQueries:
    """Queries for the series of one exporter. Methods with a span in seconds raise ServerError and TooMuchError.

    narrowing: matchers besides the site's own.
    """

    server: PrometheusServer
    exporter: Exporter
    selector: str = ""
    narrowing: tuple[str, ...] = ()

    def present(self, start_s: int, end_s: int) -> list[Metric]:
        """The metrics whose name has a sample in the span, in the preset's order."""
        query = f"count by (__name__) (last_over_time({self.everything()}{over(start_s, end_s)}))"
        found = self.server.vector(query, end_s, f"the names of the counters {_span(start_s, end_s)}")
        names = {point.labels.get("__name__") for point in found}
        return [metric for metric in self.exporter.metrics if metric.name in names]

    def others(self, start_s: int, end_s: int, *, by_labels: bool = False) -> dict[str, int]:
        """Count the series of metrics that are not counters, by metric name: unknown metrics first, then unused ones.

        A metric is the exporter's if it has its prefix and a GPU label or, by_labels, its labels for UUID and model: a
        new release can have another prefix.
        """
        chosen = f'__name__=~"{self.exporter.prefix}.+",{self.exporter.gpu_keys[0]}!=""'
        if by_labels:
            labels = [*filter(None, [self.exporter.uuid_label]), *self.exporter.model_labels]
            chosen = ",".join(f'{label}!=""' for label in labels)
            if len(labels) < 2:
                return {}
        query = f"count by (__name__) (last_over_time({self.matching('', chosen)}{over(start_s, end_s)}))"
        points = self.server.vector(query, end_s, f"the names of the exporter's metrics {_span(start_s, end_s)}")
        found = {point.labels.get("__name__", ""): int(point.value) for point in points if point.labels}
        unknown = self.exporter.unknown(found)
        unused = sorted(found.keys() - self.exporter.named.keys() - set(unknown))
        return {name: found[name] for name in (*unknown, *unused)}

    def count(self, metric: Metric, start_s: int, end_s: int) -> int:
        """Count the samples of a metric in the span, one at its start included."""
        query = f"sum(count_over_time({self.of(metric)}{over(start_s, end_s)}))"
        return self.server.number(query, end_s, f"the number of samples of {metric.name} {_span(start_s, end_s)}")

    def samples(self, selector: str, start_s: int, end_s: int) -> SeriesSamples:
        """Return all samples of a selector in the span, and those at its very end."""
        what = f"the samples of {selector.partition('{')[0]} {_span(start_s, end_s)}"
        return self.server.samples(selector + over(start_s, end_s), end_s, what)

    def info(self, start_s: int, end_s: int) -> dict[tuple[str, ...], dict[str, str]]:
        """Labels of GPUs that only the exporter's info_metric has, by `gpu_key` of its series."""
        exporter = self.exporter
        if not exporter.info_metric:
            return {}
        query = f"last_over_time({self.matching(exporter.info_metric)}{over(start_s, end_s)})"
        found = self.server.vector(query, end_s, f"the labels of GPUs {_span(start_s, end_s)}")
        added = {*exporter.gpu_labels, exporter.uuid_label, *exporter.model_labels}
        return {
            gpu_key(point.labels, exporter): {name: text for name, text in point.labels.items() if name in added}
            for point in found
        }

    def name_gpus(self, samples: SeriesSamples, info: Mapping[tuple[str, ...], Mapping[str, str]]) -> None:
        """Add the labels of `info` to series that lack them."""
        for labels in samples.labels if info else ():
            labels.update({**info.get(gpu_key(labels, self.exporter), {}), **labels})

    def nodes(self, start_s: int, end_s: int) -> list[Mapping[str, str]]:
        """The host labels of the series of memory and use that have a sample in the span."""
        names = [one.name for column in ("hbm_used_mib", "gpu_util_pct") for one in self.exporter.names_of(column)]
        series = self.matching("", f'__name__=~"{"|".join(names or self.exporter.named)}"')
        query = f"group by ({', '.join(self.exporter.host_labels)}) (last_over_time({series}{over(start_s, end_s)}))"
        return [point.labels for point in self.server.vector(query, end_s, f"the nodes {_span(start_s, end_s)}")]

    def of(self, metric: Metric) -> str:
        """A selector of a metric."""
        return self.matching(metric.name, *(f"{label}={json.dumps(text)}" for label, text in metric.where.items()))

    def everything(self, *matchers: str) -> str:
        """A selector of all counters."""
        return self.matching("", f'__name__=~"{"|".join(self.exporter.named)}"', *matchers)

    def matching(self, metric: str, *matchers: str) -> str:
        """A selector of series, the site's own matchers included."""
        own = self.selector.strip().removeprefix("{").removesuffix("}").strip().strip(",")
        return f"{metric}{{{','.join([*matchers, *self.narrowing, *filter(None, [own])])}}}"


def gpu_key(labels: Mapping[str, str], exporter: Exporter) -> tuple[str, ...]:
    """The texts by which a series finds its GPU among the series of info_metric."""
    return tuple(labels.get(name, "") for name in (*exporter.host_labels, *exporter.info_labels))


def host_matchers(exporter: Exporter, nodes: Collection[str]) -> tuple[str, ...]:
    """Matchers of the series on these Slurm nodes, however the exporter writes their names; () for no or many nodes.

    A series has one of the exporter's host labels, so each of them may also be absent.
    """
    names = sorted({node.partition(".")[0] for node in nodes})
    if not 0 < len(names) <= MOST_HOSTS or not all(map(_NODE.fullmatch, names)):
        return ()
    pattern = f"(?i:({'|'.join(names)})([.:].*)?)|"
    return tuple(f'{label}=~"{pattern}"' for label in exporter.host_labels)


def over(start_s: int, end_s: int) -> str:
    """The range of a span, in an instant query at its end."""
    return f"[{(end_s - start_s) * 1000 + 1}ms]"


def _span(start_s: int, end_s: int) -> str:
    start, end = (dt.datetime.fromtimestamp(time_s, dt.UTC) for time_s in (start_s, end_s))
    return f"of {start:%Y-%m-%d %H:%M:%S} to {end:%H:%M:%S} UTC"


_FUTURE_S = 600
"""Prometheus refuses samples that are stamped further ahead than this (storage.tsdb, 10 minutes)."""
_CLOCK_TOLERANCE_S = 5
_MOST_NAMED, _MORE = 40, "series of more unknown metrics"
_NAMES_S = 600
"""Before the newest sample, how far back unknown metrics are looked for."""


class PrometheusSource:
    """A `Source` of telemetry. Nothing is sent before `read`.

    hosts: Slurm nodes to read; () for all. Above MOST_HOSTS, all are asked for. partition_nodes: given the partitions
    that the server is read for, their nodes. shared: who gives the nodes that several servers have.
    scrape_interval_s: the median over GPUs of the median gap between samples, of the newest batch; None before one.
    Each batch also carries its own, in the schema metadata of its rows under "scrape_interval_s".
    """

    shared: SharedNodes | None = None

    def __init__(
        self,
        config: Prometheus,
        *,
        hosts: Collection[str] = (),
        partition_nodes: Callable[[Sequence[str]], Collection[str]] = lambda partitions: (),
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.name = config.source_name
        self.config, self._clock, self._partition_nodes = config, clock, partition_nodes
        self._server = PrometheusServer(config, clock=clock, sleep=sleep, rng=rng)
        self._exporter, self._hosts = exporter_of(config), frozenset(hosts)
        self._span_s = config.chunk_minutes * 60
        self.scrape_interval_s: float | None = None

    @cached_property
    def _nodes(self) -> frozenset[str]:
        """The short names, in lower case, of the nodes to read; empty: all. Raises ConfigError, CommandError."""
        own = set(self._partition_nodes(self.config.partitions)) if self.config.partitions else set()
        try:
            own |= set(expand(self.config.nodes)) if self.config.nodes else set()
        except ValueError as error:
            said = f"{self.config.place}nodes is {printable(self.config.nodes, 80)!r}: {error}"
            raise ConfigError(said, "write a hostlist such as gpu[001-128]") from error
        if (self.config.nodes or self.config.partitions) and not own:
            raise ConfigError(f"{self.config.place}partitions name no node", "compare them with sinfo")
        wanted = own & self._hosts if own and self._hosts else own or self._hosts
        return frozenset(map(_short, wanted)) if wanted or not own else _NO_NODES

    @cached_property
    def _queries(self) -> GpuQueries:
        return self._asking(self._server)

    def _asking(self, server: PrometheusServer) -> GpuQueries:
        return GpuQueries(server, self._exporter, self.config.selector, host_matchers(self._exporter, self._nodes))

    def nodes_in(self, start_s: int, end_s: int) -> frozenset[str]:
        """The short names, in lower case, of the nodes with samples in a span. Raises ServerError, ConfigError."""
        if self._nodes is _NO_NODES:
            return frozenset()
        server = PrometheusServer(replace(self.config, retries=min(self.config.retries, 1)), clock=self._clock)
        suffix, asked = self.config.host_suffix, self._asking(server)
        labels = asked.nodes(start_s, end_s)
        hosts = (host_of(each, self._exporter, suffix) for each in labels if _has_host(each, self._exporter))
        return frozenset(node for node in map(_short, hosts) if not self._nodes or node in self._nodes)

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Batches of [since_s, until_s), in time order, none newer than delay_s ago.

        The watermark goes no further than the newest sample: with a clock that is ahead, what comes after it is
        still to be scraped.

        A span without any sample gives no batch, and so moves no watermark: it may be the selector that is wrong, or
        a server that was down. A last batch without rows names the exporter's metrics that almanac does not know.
        Raises SourceError if there are only such metrics, and ServerError where the server cannot be asked; batches
        given before that stand.
        """
        newest_s = int(self._clock()) - self.config.delay_s
        start_s, end_s = max(since_s, 0), min(until_s, newest_s)
        if self._nodes is _NO_NODES:
            return
        first_s, read_s = start_s, None
        future = self._future_samples() if since_s < newest_s < until_s + _FUTURE_S else Counts()
        while start_s < end_s:
            stop_s = min(_border(start_s, self._span_s), end_s)
            try:
                batch = self._read_chunk(start_s, stop_s)
            except TooMuchError as error:
                self._shrink(stop_s - start_s, str(error))
                continue
            start_s = stop_s
            if batch is not None:
                batch.counts.add(future)
                future, read_s = Counts(), batch.watermark_s
                yield batch
        if not self._hosts and first_s < end_s:
            yield from self._unknown(first_s, end_s, read_s)

    def _unknown(self, start_s: int, end_s: int, read_s: int | None) -> Iterator[RowBatch]:
        """The batch that names unknown metrics, if any. read_s: end of what was read; None if there is no counter."""
        if read_s is None:
            self._check_names(min(start_s, end_s - _NAMES_S), end_s)
            return
        try:
            found = self._queries.others(max(start_s, read_s - _NAMES_S), end_s)
        except (TooMuchError, ServerError):
            return  # everything is read, and the next run asks again
        unknown = {name: found[name] for name in self._queries.exporter.unknown(found)}
        counts = Counts(seen=sum(unknown.values()))
        for at, (name, number) in enumerate(unknown.items()):
            said = f"series of an unknown metric: {printable(name, 80)}" if at < _MOST_NAMED else _MORE
            counts.drop(said, number, printable(name, 80) if said == _MORE else "")
        if unknown:
            yield RowBatch("telemetry", TELEMETRY.empty_table(), counts)

    def _check_names(self, start_s: int, end_s: int) -> None:
        """Raise SourceError if the span, or its last day if that is too much, has unknown metrics and no counter."""
        queries = self._queries
        for first_s in (start_s, max(start_s, end_s - DAY_S)):
            try:
                found = [*queries.others(first_s, end_s), *queries.others(first_s, end_s, by_labels=True)]
                unknown = queries.exporter.unknown(found)
                if unknown and not queries.present(first_s, end_s):
                    raise SourceError(
                        f"Prometheus at {self._server.address} has no counter that almanac knows, "
                        f"but {listed(unknown, 'unknown metric', 8)}",
                        "run almanac doctor; give the exporter almanac's list (docs/counters.md), or update almanac",
                    )
                return
            except TooMuchError:
                continue

    def _shrink(self, span_s: int, said: str) -> None:
        """Ask for half as much from here on. Raises ServerError where a second is still too much."""
        if span_s <= 1:
            raise ServerError(
                f"Prometheus at {self._server.address} refuses even one second of samples: {said}",
                "raise Prometheus' --query.max-samples, or narrow prometheus.selector",
            )
        self._span_s = span_s // 2

    def _read_chunk(self, start_s: int, end_s: int) -> RowBatch | None:
        """One table of [start_s, end_s); None where there is no sample. Raises TooMuchError, ServerError."""
        others = dict[str, str]()
        if self.shared:
            self.shared.check(self)
            others = self.shared.before(self, start_s, end_s)
        present = self._queries.present(start_s, end_s)
        if not present:
            return None
        self._check_amount(present, start_s, end_s)
        exporter = self._queries.exporter

        def refuse(host: str) -> str:
            if self._nodes and _short(host) not in self._nodes:
                return "node that this server is not read for"
            first = others.get(_short(host))
            return f"scraped by {first} too, which comes first" if first else ""

        pivot = Pivot(exporter, self.config.host_suffix, start_s * 1000, end_s * 1000, Counts(), refuse)
        info = self._queries.info(start_s, end_s)
        for metric in present:
            samples = self._queries.samples(self._queries.of(metric), start_s, end_s)
            self._queries.name_gpus(samples, info)
            pivot.add(metric, samples)
        if exporter.job_metric:
            pivot.add_jobs(self._queries.samples(self._queries.matching(exporter.job_metric), start_s, end_s))
        if not pivot.counts.seen:
            return None
        gaps_s, rows = pivot.median_gaps_s(), pivot.table()
        if self.shared:
            rows = self.shared.unless_stored(self, rows, (start_s, end_s), pivot.counts)
        if len(gaps_s):
            self.scrape_interval_s = float(np.median(gaps_s))
            rows = rows.replace_schema_metadata({"scrape_interval_s": f"{self.scrape_interval_s:g}"})
        return RowBatch("telemetry", rows, pivot.counts, watermark_s=min(end_s, pivot.newest_ms // 1000 + 1))

    def _check_amount(self, present: Sequence[Metric], start_s: int, end_s: int) -> None:
        """Raise TooMuchError where the span holds more samples than may be in memory, by the first counter's number."""
        columns = [metric.counter.column for metric in present]
        first = [metric for metric in present if metric.counter.column == columns[0]]
        expected = self._count(first, start_s, end_s) * len(set(columns))
        if expected > self.config.max_samples and end_s - start_s > 1:
            raise TooMuchError(f"{expected} samples are more than one query may give")

    def _count(self, metrics: Collection[Metric], start_s: int, end_s: int) -> int:
        return sum(self._queries.count(metric, start_s, end_s) for metric in metrics)

    def _future_samples(self) -> Counts:
        """Samples stamped later than now, by the first counter: the clocks of this host and of Prometheus disagree.

        They are left where they are, and read once they are no longer in the future.
        """
        now_s = int(self._clock()) + _CLOCK_TOLERANCE_S
        exporter = self._queries.exporter
        first = exporter.names_of(exporter.metrics[0].counter.column)
        number = self._count(first, now_s, now_s + _FUTURE_S)
        counts = Counts()
        counts.note("time in the future, left for later", number, "compare the clocks of this host and of Prometheus")
        return counts


_NO_NODES = frozenset({""})


def _short(host: str) -> str:
    return short_host(host).lower()


def _has_host(labels: Mapping[str, str], exporter: Exporter) -> bool:
    try:
        return bool(host_of(labels, exporter))
    except UnusableSeriesError:
        return False


def _border(start_s: int, span_s: int) -> int:
    """The end of the chunk that starts at start_s: chunks of less than an hour are counted from the hour and never
    reach across it, longer ones end on multiples of their length. So a chunk touches few files of the store."""
    if span_s >= HOUR_S:
        return (start_s // span_s + 1) * span_s
    hour_s, within_s = divmod(start_s, HOUR_S)
    return hour_s * HOUR_S + min((within_s // span_s + 1) * span_s, HOUR_S)
