"""Raw samples of a Prometheus server as rows of the telemetry table."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator

import numpy as np

from almanac.config import Prometheus
from almanac.errors import ServerError
from almanac.records import Counts
from almanac.units import HOUR_S
from telemetry.counters import Counter
from telemetry.sources.base import RowBatch
from telemetry.sources.exporters import EXPORTERS
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_queries import GpuQueries, host_matchers
from telemetry.sources.prometheus_server import PrometheusServer, TooMuchError

_FUTURE_S = 600
"""Prometheus refuses samples that are stamped further ahead than this (storage.tsdb, 10 minutes)."""
_CLOCK_TOLERANCE_S = 5


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
        exporter = EXPORTERS[config.exporter]
        self._queries = GpuQueries(self._server, exporter, config.selector, host_matchers(exporter, hosts))
        self._span_s = config.chunk_minutes * 60
        self.scrape_interval_s: float | None = None

    def read(self, since_s: int, until_s: int) -> Iterator[RowBatch]:
        """Batches of [since_s, until_s), in time order, none newer than delay_s ago.

        The watermark goes no further than the newest sample: with a clock that is ahead, what comes after it is
        still to be scraped.

        A span without any sample gives no batch, and so moves no watermark: it may be the selector that is wrong, or
        a server that was down. Raises ServerError where it cannot be asked; batches given before that stand.
        """
        newest_s = int(self._clock()) - self._config.delay_s
        start_s, end_s = max(since_s, 0), min(until_s, newest_s)
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
                future = Counts()
                yield batch

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
        for metric, counter in present.items():
            pivot.add(counter, self._queries.samples(metric, start_s, end_s))
        if exporter.job_metric:
            pivot.add_jobs(self._queries.samples(exporter.job_metric, start_s, end_s))
        if not pivot.counts.seen:
            return None
        gaps_s, rows = pivot.median_gaps_s(), pivot.table()
        if len(gaps_s):
            self.scrape_interval_s = float(np.median(gaps_s))
            rows = rows.replace_schema_metadata({"scrape_interval_s": f"{self.scrape_interval_s:g}"})
        return RowBatch("telemetry", rows, pivot.counts, watermark_s=min(end_s, pivot.newest_ms // 1000 + 1))

    def _check_amount(self, present: dict[str, Counter], start_s: int, end_s: int) -> None:
        """Raise TooMuchError where the span holds more samples than may be in memory, by the first counter's number."""
        expected = self._queries.count(next(iter(present)), start_s, end_s) * len(present)
        if expected > self._config.max_samples and end_s - start_s > 1:
            raise TooMuchError(f"{expected} samples are above prometheus.max_samples")

    def _future_samples(self) -> Counts:
        """Samples stamped later than now, by the first counter: the clocks of this host and of Prometheus disagree.

        They are left where they are, and read once they are no longer in the future.
        """
        now_s = int(self._clock()) + _CLOCK_TOLERANCE_S
        number = self._queries.count(next(iter(self._queries.exporter.counters())), now_s, now_s + _FUTURE_S)
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
