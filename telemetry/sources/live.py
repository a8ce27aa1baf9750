"""Counters of all GPUs in the newest minutes: one vector query a counter, so that a round of a large site is quick."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from almanac.config import Prometheus
from almanac.records import Counts
from telemetry.counters import HIGHEST, LIVE, Counter
from telemetry.sources.exporters import Metric
from telemetry.sources.pivot import Pivot
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.prometheus_json import Point, SeriesSamples
from telemetry.sources.series import parse_job_label, short_host

_UNREAD = frozenset({"energy_mj", "temp_c", "pcie_tx_bytes_s", "pcie_rx_bytes_s"})
SAMPLES = Metric("samples", Counter("sample_count", "samples", "", 0, 1e6))
CHANGES = Metric("changes", next(each for each in LIVE if each.column == "xid_changes"))
BEFORE_S = 60
"""A change is between two samples: the first of them may be so long before the span, and still in the job's time."""
MORE = (*(each.column for each in LIVE), "sample_count")
"""Columns of `live_counters` that the store does not have."""
SERVING = ("vllm:num_requests_running", "nv_inference_request_success")
"""Metrics of inference servers that are there while they run (docs.vllm.ai, design/metrics, v0.9; Triton's
docs/user_guide/metrics.md, 25.05)."""
HOST_MEMORY = (
    ("jobid", 'cgroup_memory_rss_bytes{step="",task=""}', 'cgroup_memory_total_bytes{step="",task=""}'),
    ("slurmjobid", "slurm_job_memory_rss", "slurm_job_memory_limit"),
)
"""Job label, memory without page cache, and its limit: Princeton's cgroup_exporter, as jobstats reads it, and
slurm-job-exporter (guilbaults, commit 0721a2ce)."""


class LiveSource(PrometheusSource):
    """One server, asked for the end of its data. All methods raise ServerError and ConfigError."""

    def live_counters(self, at_s: int, span_s: int) -> pa.Table:
        """The counters of each GPU with samples in the span, as a row of the telemetry table and MORE."""
        queries, exporter = self._queries, self._queries.exporter
        start_s = at_s - span_s
        present = [each for each in queries.present(start_s, at_s) if each.counter.column not in _UNREAD]

        def refuse(host: str) -> str:
            return "other node" if self._nodes and short_host(host).lower() not in self._nodes else ""

        pivot = Pivot(exporter, self.config.host_suffix, start_s * 1000, at_s * 1000, Counts(), refuse)
        info = queries.info(start_s, at_s)

        def take(metric: Metric, function: str, *of: Metric, over_s: int = span_s) -> None:
            values = " or ".join(f"{function}({queries.of(each)}{_over(over_s)})" for each in of)
            samples = self._vector(f"max by ({self._labels}) ({values})", at_s)
            queries.name_gpus(samples, info)
            pivot.add(metric, samples)

        read = (*present, *(exporter.live if present else ()))
        changing = [each for each in read if each.counter.column in ("xid", "xid_changes")]
        for metric in read:
            column = metric.counter.column
            if column != "xid_changes":
                latest = "last_over_time" if column == "xid" else "avg_over_time"
                take(metric, "max_over_time" if column in HIGHEST else latest, metric)
        if changing:
            take(CHANGES, "changes", *changing, over_s=span_s + BEFORE_S)
        # Exporters give GPU_UTIL of whole GPUs only, not of MIG slices.
        used = [each for each in present if each.counter.column in ("gpu_util_pct", "gr_engine_active_frac")]
        if present:
            take(SAMPLES, "count_over_time", *(used or present[:1]))
        if present and exporter.job_metric and not exporter.job_flag:
            selector = queries.matching(exporter.job_metric) + _over(span_s)
            pivot.add_jobs(self._vector(f"max by ({self._labels}) (last_over_time({selector}))", at_s))
        return pivot.table(MORE)

    def serving_hosts(self, at_s: int, span_s: int) -> set[str]:
        """The short names, in lower case, of hosts with an inference server that was scraped in the span."""
        names = "|".join(map(re.escape, SERVING)).replace("\\", "\\\\")
        query = f'group by (instance) (last_over_time({{__name__=~"{names}"}}{_over(span_s)}))'
        return {_host(point) for point in self._ask(query, at_s)} - {""}

    def host_memory(self, at_s: int, span_s: int) -> dict[int, tuple[float, float]]:
        """Memory in use and its limit, MiB, on the fullest node of each job that a cgroup exporter shows."""
        found: dict[int, tuple[float, float]] = {}
        for label, *selectors in HOST_MEMORY:
            used, limit = (
                {
                    (point.labels.get(label, ""), point.labels.get("instance", "")): point.value / 2**20
                    for point in self._ask(f"max by ({label}, instance) (last_over_time({each}{_over(span_s)}))", at_s)
                }
                for each in selectors
            )
            for key in used.keys() & limit.keys():
                job_id, _ = parse_job_label(key[0])
                if job_id and 0 <= used[key] <= limit[key] * 1.01 and limit[key] > 0:
                    shown = used[key], limit[key]
                    found[job_id] = max(found.get(job_id, shown), shown, key=lambda pair: pair[0] / pair[1])
        return found

    @property
    def _labels(self) -> str:
        exporter = self._queries.exporter
        several = (*exporter.host_labels, *exporter.gpu_labels, *exporter.info_labels, *exporter.model_labels)
        one = (exporter.uuid_label, exporter.job_label, exporter.mig_label, exporter.profile_label)
        return ", ".join(sorted({*several, *filter(None, one)}))

    def _ask(self, query: str, at_s: int) -> list[Point]:
        return self._server.vector(query, at_s, f"running jobs at {dt.datetime.fromtimestamp(at_s, dt.UTC):%H:%M} UTC")

    def _vector(self, query: str, at_s: int) -> SeriesSamples:
        points = self._ask(query, at_s)
        values = np.array([point.value for point in points], dtype=np.float64)
        values[~np.isfinite(values)] = np.nan
        number, at_ms = len(points), at_s * 1000 - 1
        return SeriesSamples(
            [point.labels for point in points], np.ones(number, np.int64), np.full(number, at_ms, np.int64), values
        )


def live_sources(config: Prometheus, cluster: str) -> list[LiveSource]:
    return [LiveSource(each) for each in config.servers if not each.cluster or each.cluster == cluster]


def joined(tables: Iterable[pa.Table]) -> pa.Table:
    """Join the tables of several servers; a host that two of them scrape is the first one's."""
    kept, seen = list[pa.Table](), set[str]()
    for table in tables:
        hosts = [str(host) for host in table["host"].to_pylist()]
        kept.append(table.filter(pa.array([host not in seen for host in hosts], pa.bool_())))
        seen.update(hosts)
    return pa.concat_tables(kept)


def _over(span_s: int) -> str:
    """The range of a span that ends with the query: a sample at its start was in the span before."""
    return f"[{span_s * 1000 - 1}ms]"


def _host(point: Point) -> str:
    return short_host(point.labels.get("instance", "").rpartition(":")[0]).lower()
