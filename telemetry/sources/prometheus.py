"""Raw samples of a Prometheus server as rows of the telemetry table."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator

import numpy as np

from almanac.config import Prometheus
from almanac.errors import ServerError, SourceError
from almanac.records import Counts
from almanac.units import DAY_S, HOUR_S, listed, printable
from telemetry.sources.base import RowBatch
from telemetry.sources.exporters import Metric, presets
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_queries import GpuQueries, host_matchers
from telemetry.sources.prometheus_server import PrometheusServer, TooMuchError
from telemetry.store.schema import TELEMETRY

_FUTURE_S = 600
"""Prometheus refuses samples that are stamped further ahead than this (storage.tsdb, 10 minutes)."""
_CLOCK_TOLERANCE_S = 5
_MOST_NAMED, _MORE = 40, "series of more unknown metrics"
_NAMES_S = 600
"""Before the newest sample, how far back unknown metrics are looked for."""


class PrometheusSource:
    """A `Source` of telemetry. Nothing is sent before `read`.

    hosts: Slurm nodes to read; () for all. Above MOST_HOSTS, all are read.
    scrape_interval_s: the median over GPUs of the median gap between samples, of the newest batch; None before one.
    Each batch also carries its own, in the schema metadata of its rows under "scrape_interval_s".
    """

    name = "prometheus"

    def __init__(
        self,
        config: Prometheus,
        *,
        hosts: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._config, self._clock = config, clock
        self._server = PrometheusServer(config, clock=clock, sleep=sleep, rng=rng)
        exporter = presets()[config.exporter]
        self._queries = GpuQueries(self._server, exporter, config.selector, host_matchers(exporter, hosts))
        self._is_whole_site = not hosts
        self._span_s = config.chunk_minutes * 60
        self.scrape_interval_s: float | None = None

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Batches of [since_s, until_s), in time order, none newer than delay_s ago.

        The watermark goes no further than the newest sample: with a clock that is ahead, what comes after it is
        still to be scraped.

        A span without any sample gives no batch, and so moves no watermark: it may be the selector that is wrong, or
        a server that was down. A last batch without rows names the exporter's metrics that almanac does not know.
        Raises SourceError if there are only such metrics, and ServerError where the server cannot be asked; batches
        given before that stand.
        """
        newest_s = int(self._clock()) - self._config.delay_s
        start_s, end_s = max(since_s, 0), min(until_s, newest_s)
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
        if self._is_whole_site and first_s < end_s:
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
        present = self._queries.present(start_s, end_s)
        if not present:
            return None
        self._check_amount(present, start_s, end_s)
        exporter = self._queries.exporter
        pivot = Pivot(exporter, self._config.host_suffix, start_s * 1000, end_s * 1000, Counts())
        for name, metric in present.items():
            pivot.add(metric, self._queries.samples(name, start_s, end_s))
        if exporter.job_metric:
            pivot.add_jobs(self._queries.samples(exporter.job_metric, start_s, end_s))
        if not pivot.counts.seen:
            return None
        gaps_s, rows = pivot.median_gaps_s(), pivot.table()
        if len(gaps_s):
            self.scrape_interval_s = float(np.median(gaps_s))
            rows = rows.replace_schema_metadata({"scrape_interval_s": f"{self.scrape_interval_s:g}"})
        return RowBatch("telemetry", rows, pivot.counts, watermark_s=min(end_s, pivot.newest_ms // 1000 + 1))

    def _check_amount(self, present: dict[str, Metric], start_s: int, end_s: int) -> None:
        """Raise TooMuchError where the span holds more samples than may be in memory, by the first counter's number."""
        columns = [metric.counter.column for metric in present.values()]
        names = [name for name, column in zip(present, columns, strict=True) if column == columns[0]]
        expected = self._count(names, start_s, end_s) * len(set(columns))
        if expected > self._config.max_samples and end_s - start_s > 1:
            raise TooMuchError(f"{expected} samples are more than one query may give")

    def _count(self, names: Collection[str], start_s: int, end_s: int) -> int:
        return sum(self._queries.count(name, start_s, end_s) for name in names)

    def _future_samples(self) -> Counts:
        """Samples stamped later than now, by the first counter: the clocks of this host and of Prometheus disagree.

        They are left where they are, and read once they are no longer in the future.
        """
        now_s = int(self._clock()) + _CLOCK_TOLERANCE_S
        exporter = self._queries.exporter
        names = [metric.name for metric in exporter.names_of(exporter.metrics[0].counter.column)]
        number = self._count(names, now_s, now_s + _FUTURE_S)
        counts = Counts()
        counts.note("time in the future, left for later", number, "compare the clocks of this host and of Prometheus")
        return counts


def _border(start_s: int, span_s: int) -> int:
    """The end of the chunk that starts at start_s: chunks of less than an hour are counted from the hour and never
    reach across it, longer ones end on multiples of their length. So a chunk touches few files of the store."""
    if span_s >= HOUR_S:
        return (start_s // span_s + 1) * span_s
    hour_s, within_s = divmod(start_s, HOUR_S)
    return hour_s * HOUR_S + min((within_s // span_s + 1) * span_s, HOUR_S)
