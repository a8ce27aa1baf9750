"""The queries that almanac asks Prometheus about GPUs.

Range selectors in instant queries give samples as they were scraped; query_range would resample them. A selector's
left border is closed in Prometheus 2 and open in 3, so each one starts 1 ms early: whoever reads cuts off what lies
outside [start, end), and every sample belongs to exactly one span on either.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection
from dataclasses import dataclass

from telemetry.sources.exporters import Exporter, Metric
from telemetry.sources.prometheus_json import SeriesSamples
from telemetry.sources.prometheus_server import PrometheusServer

MOST_HOSTS = 200
"""Hosts that a query names. It goes into an address, which servers take up to some 8,000 characters."""
_NODE = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class GpuQueries:
    """Queries for the series of one exporter. Spans are in seconds; all raise ServerError and TooMuchError.

    narrowing: matchers besides the site's own.
    """

    server: PrometheusServer
    exporter: Exporter
    selector: str = ""
    narrowing: tuple[str, ...] = ()

    def present(self, start_s: int, end_s: int) -> dict[str, Metric]:
        """The metrics that have a sample in the span, by name, in the preset's order."""
        query = f"count by (__name__) (last_over_time({self.everything()}{over(start_s, end_s)}))"
        found = self.server.vector(query, end_s, f"the names of the counters {_span(start_s, end_s)}")
        names = {point.labels.get("__name__") for point in found}
        return {name: metric for name, metric in self.exporter.named.items() if name in names}

    def others(self, start_s: int, end_s: int, *, by_labels: bool = False) -> dict[str, int]:
        """Series in the span of the exporter's metrics that are no counter, by name: the unknown ones, then the unused.

        Such a metric is of a GPU, and has the exporter's prefix or, by_labels, its other labels: the prefix may be new.
        """
        chosen = f'__name__=~"{self.exporter.prefix}.*",{self.exporter.gpu_labels[0]}!=""'
        if by_labels:
            chosen = f'{self.exporter.uuid_label}!="",{self.exporter.model_label}!=""'
        query = f"count by (__name__) (last_over_time({self.matching('', chosen)}{over(start_s, end_s)}))"
        points = self.server.vector(query, end_s, f"the names of the exporter's metrics {_span(start_s, end_s)}")
        found = {point.labels.get("__name__", ""): int(point.value) for point in points if point.labels}
        unknown = self.exporter.unknown(found)
        unused = sorted(found.keys() - self.exporter.named.keys() - set(unknown))
        return {name: found[name] for name in (*unknown, *unused)}

    def count(self, metric: str, start_s: int, end_s: int) -> int:
        """How many samples a metric has in the span, one at its start included."""
        query = f"sum(count_over_time({self.matching(metric)}{over(start_s, end_s)}))"
        return self.server.number(query, end_s, f"the number of samples of {metric} {_span(start_s, end_s)}")

    def samples(self, metric: str, start_s: int, end_s: int) -> SeriesSamples:
        """All samples of a metric in the span, and those at its very end."""
        query = self.matching(metric) + over(start_s, end_s)
        return self.server.samples(query, end_s, f"the samples of {metric} {_span(start_s, end_s)}")

    def everything(self, *matchers: str) -> str:
        """A selector of all counters."""
        return self.matching("", f'__name__=~"{"|".join(self.exporter.named)}"', *matchers)

    def matching(self, metric: str, *matchers: str) -> str:
        """A selector of series, the site's own matchers included."""
        own = self.selector.strip().removeprefix("{").removesuffix("}").strip().strip(",")
        return f"{metric}{{{','.join([*matchers, *self.narrowing, *filter(None, [own])])}}}"


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
