"""Raw samples of a Prometheus server as rows of the telemetry table.

Range selectors in instant queries give samples as they were scraped; query_range would resample them. A selector's
left border is closed in Prometheus 2 and open in 3: each query starts 1 ms early, and what lies outside its chunk
[start, end) is cut off, so that every sample belongs to exactly one chunk on either.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from almanac.config import Prometheus
from almanac.errors import ServerError
from almanac.records import Counts
from telemetry.counters import Counter
from telemetry.sources.base import Batch
from telemetry.sources.exporters import EXPORTERS
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus_json import Samples
from telemetry.sources.prometheus_server import PrometheusServer, TooMuchError

_HOUR_S = 3600
_FUTURE_S = 600
_NEAR_S = 3600
_CLOCK_TOLERANCE_S = 5


class PrometheusSource:
    """A `Source` of telemetry. Nothing is sent before `read`.

    scrape_interval_s: after reading, the median over GPUs of the median gap between samples of the newest chunk;
    None before. Each batch carries its own in the schema metadata of its rows ("scrape_interval_s").
    """

    name = "prometheus"

    def __init__(
        self,
        config: Prometheus,
        *,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self._config, self._clock = config, clock
        self._exporter = EXPORTERS[config.exporter]
        self._server = PrometheusServer(config, clock=clock, sleep=sleep, rng=rng)
        self._span_s = config.chunk_minutes * 60
        self.scrape_interval_s: float | None = None

    def read(self, since_s: int, until_s: int) -> Iterator[Batch]:
        """Batches of [since_s, until_s), in time order, none newer than delay_s ago.

        A span without any sample gives no batch, and so moves no watermark: it may be the selector that is wrong, or
        an exporter that was down. Raises ServerError where the server cannot be asked; batches given before it stand.
        """
        newest_s = int(self._clock()) - self._config.delay_s
        start_s, end_s = since_s, min(until_s, newest_s)
        future = self._future_samples() if since_s < newest_s <= until_s + _NEAR_S else Counts()
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
                "raise --query.max-samples of Prometheus, or narrow prometheus.selector",
            )
        self._span_s = span_s // 2

    def _read_chunk(self, start_s: int, end_s: int) -> Batch | None:
        """One table of [start_s, end_s); None where there is no sample. Raises TooMuchError, ServerError."""
        present = self._present(start_s, end_s)
        if not present:
            return None
        self._check_amount(present, start_s, end_s)
        pivot = Pivot(self._exporter, self._config.host_suffix, start_s * 1000, end_s * 1000, Counts())
        for metric, counter in present.items():
            pivot.add(counter, self._samples(metric, start_s, end_s))
        if self._exporter.job_metric:
            pivot.add_jobs(self._samples(self._exporter.job_metric, start_s, end_s))
        gaps_s, rows = pivot.median_gaps_s(), pivot.table()
        if len(gaps_s):
            self.scrape_interval_s = float(np.median(gaps_s))
            rows = rows.replace_schema_metadata({"scrape_interval_s": f"{self.scrape_interval_s:g}"})
        return Batch("telemetry", rows, pivot.counts, watermark_s=end_s)

    def _present(self, start_s: int, end_s: int) -> dict[str, Counter]:
        """The counters that have samples in the span, by metric: absent ones need no query of their own."""
        counters = self._exporter.counters()
        everything = self._selector("", f'__name__=~"{"|".join(counters)}"')
        found = self._server.query(f"count by (__name__) (last_over_time({everything}{_range(start_s, end_s)}))", end_s)
        names = {series["metric"]["__name__"] for series in found}
        return {metric: counter for metric, counter in counters.items() if metric in names}

    def _check_amount(self, present: dict[str, Counter], start_s: int, end_s: int) -> None:
        """Raise TooMuchError where the span holds more samples than may be in memory, by the first counter's number."""
        each = self._count(next(iter(present)), start_s, end_s)
        if each * len(present) > self._config.max_samples:
            raise TooMuchError(f"{each * len(present)} samples are above prometheus.max_samples")

    def _future_samples(self) -> Counts:
        """Samples stamped later than now: the clocks of this host and of Prometheus disagree. They are left where
        they are, and read once they are no longer in the future."""
        now_s = int(self._clock()) + _CLOCK_TOLERANCE_S
        number = self._count(next(iter(self._exporter.counters())), now_s, now_s + _FUTURE_S)
        counts = Counts(seen=number)
        counts.drop("time in the future", number, "compare the clocks of this host and of Prometheus")
        return counts

    def _count(self, metric: str, start_s: int, end_s: int) -> int:
        found = self._server.query(f"sum(count_over_time({self._selector(metric)}{_range(start_s, end_s)}))", end_s)
        return int(float(found[0]["value"][1])) if found else 0

    def _samples(self, metric: str, start_s: int, end_s: int) -> Samples:
        found: Any = self._server.query(self._selector(metric) + _range(start_s, end_s), end_s)
        if not isinstance(found, Samples):
            raise ServerError(
                f"Prometheus at {self._server.address} answered a range selector without samples",
                "check prometheus.url",
            )
        return found

    def _selector(self, metric: str, *matchers: str) -> str:
        own = self._config.selector.strip().removeprefix("{").removesuffix("}").strip().strip(",")
        return f"{metric}{{{','.join([*matchers, *filter(None, [own])])}}}"


def _border(start_s: int, span_s: int) -> int:
    """The end of the chunk that starts at start_s: at the next multiple of span_s, and never across an hour
    where chunks are shorter than one, so that a chunk touches one file of the store."""
    border_s = (start_s // span_s + 1) * span_s
    return min(border_s, (start_s // _HOUR_S + 1) * _HOUR_S) if span_s < _HOUR_S else border_s


def _range(start_s: int, end_s: int) -> str:
    return f"[{(end_s - start_s) * 1000 + 1}ms]"


@dataclass(frozen=True)
class PrometheusStatus:
    """What a Prometheus server has of the GPUs in the last PROBE_S seconds.

    counters_present: our columns. counters_missing: the exporter's name of each counter that has no sample, with what
    to change. scrape_interval_s is None where no GPU has two samples.
    """

    version: str
    hosts: int
    gpus: int
    counters_present: tuple[str, ...]
    counters_missing: dict[str, str]
    scrape_interval_s: float | None


PROBE_S = 600


def probe(config: Prometheus, *, clock: Callable[[], float] = time.time) -> PrometheusStatus:
    """Ask once, without retries, what is there. Raises ServerError where nothing answers, ConfigError."""
    config = replace(config, retries=0)
    source = PrometheusSource(config, clock=clock)
    version, now_s = source.version(), int(clock())
    present, gpus, gaps_s = source.look(now_s - PROBE_S, now_s)
    missing = {metric: _setting(metric, counter) for metric, counter in source.counters().items() if metric not in present}
    return PrometheusStatus(
        version=version,
        hosts=len({gpu.host for gpu in gpus}),
        gpus=len(gpus),
        counters_present=tuple(counter.column for counter in present.values()),
        counters_missing=missing,
        scrape_interval_s=float(np.median(gaps_s)) if len(gaps_s) else None,
    )
