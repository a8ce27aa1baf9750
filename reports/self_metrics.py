"""almanac's own metrics in Prometheus' text format: mail, ingestion, and what became of advice and forecasts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Metric

from almanac import __version__
from almanac.exposition import Labels, family
from almanac.published.outgoing import outgoing_of
from almanac.units import DAY_S
from reports.advice_outcomes import load_told
from reports.mail.record_file import RecordCounts, read_counts, record_path
from reports.published.live import LiveJobs, all_live
from telemetry.health.failures import node_failures
from telemetry.store.progress import ahead_s
from telemetry.store.store import ClusterStore, Store

WINDOW_DAYS = 7
MOST_NODES = 100
"""Nodes with failures that have a series: those with the most."""
SOURCES = ("sacct", "prometheus")
_OUTCOMES = "SELECT outcome, count(*) FROM told WHERE outcome IS NOT NULL GROUP BY 1 ORDER BY 1"
_ERRORS = """
SELECT count(*), median(error), avg((error <= ln(2))::INT)
FROM (SELECT abs(ln(greatest(predicted_s, 1)) - ln(greatest(ran_s, 1))) AS error FROM told
      WHERE predicted_s IS NOT NULL AND ran_s IS NOT NULL)
"""


@dataclass(frozen=True)
class AdviceOutcomes:
    """Outcomes of the advice on jobs submitted in the window. outcomes: jobs by what became of the advised tier.

    jobs: with a predicted duration that have ended. median_abs_log_error, share_within_2x: of these; None without any.
    """

    outcomes: dict[str, int]
    jobs: int
    median_abs_log_error: float | None
    share_within_2x: float | None


def collect(store: Store, now_s: int) -> list[Metric]:
    """Return each metric of the store that has a value, for every cluster. Raises StoreError."""
    clusters = store.clusters()
    counts = read_counts(record_path(store.root))
    return [
        family("almanac_build_info", "gauge", "Version of almanac.", [((("version", __version__),), 1)]),
        *(_of_reports(counts, now_s) if counts else ()),
        *_of_ingestion(store, clusters, now_s),
        *_of_advice({cluster: load_outcomes(store.of(cluster), now_s) for cluster in clusters}),
        *_of_running({cluster: all_live(outgoing_of(store.root, cluster), now_s) for cluster in clusters}),
        *_of_nodes(store, clusters, now_s),
    ]


def _of_reports(counts: RecordCounts, now_s: int) -> Iterator[Metric]:
    yield _counter("sent", "Reports that the mail server has taken, by kind.", _by("kind", counts.sent))
    yield _counter(
        "failed_tries", "Mails that were not taken, or not made; they are due again.", [((), counts.failed_tries)]
    )
    yield _counter("given_up", "Ended runs whose mail was never taken.", [((), counts.given_up)])
    yield _counter("skipped", "Ended runs without a report, by reason.", _by("reason", counts.skipped))
    for name, about, number, oldest_s in (
        (
            "waiting",
            "Ended runs that wait for their telemetry, or for a decision.",
            counts.waiting,
            counts.oldest_end_s,
        ),
        (
            "refused",
            "Mails that the server did not take, which are due again.",
            counts.refused,
            counts.oldest_refused_s,
        ),
    ):
        yield family(f"almanac_reports_{name}", "gauge", about, [((), number)])
        age: list[tuple[Labels, float]] = [] if oldest_s is None else [((), max(now_s - oldest_s, 0))]
        yield family(f"almanac_reports_{name}_oldest_age_seconds", "gauge", "Age of the oldest of these.", age)


def _counter(name: str, about: str, samples: Sequence[tuple[Labels, float]]) -> Metric:
    return family(f"almanac_reports_{name}_total", "counter", about, samples)


def _by(label: str, numbers: Any) -> list[tuple[Labels, float]]:
    return [(((label, name),), number) for name, number in sorted(numbers.items())]


def _of_ingestion(store: Store, clusters: Sequence[str], now_s: int) -> Iterator[Metric]:
    marks = {
        (("cluster", cluster), ("source", source)): mark
        for cluster in clusters
        for source in SOURCES
        if (mark := store.of(cluster).watermark(source)) is not None
    }
    yield family("almanac_ingest_watermark_timestamp_seconds", "gauge", "Up to when a source has been read.",
                 list(marks.items()))  # fmt: skip
    yield family("almanac_ingest_lag_seconds", "gauge", "How far what was read is behind, when this was written.",
                 [(labels, max(now_s - mark, 0)) for labels, mark in marks.items()])  # fmt: skip
    yield family("almanac_ingest_watermark_ahead_seconds", "gauge", "How far a watermark lies in the future.",
                 [((("cluster", cluster), ("source", source)), ahead_s(mark, now_s))
                  for cluster in clusters for source, mark in store.of(cluster).watermarks().items()])  # fmt: skip
    yield family("almanac_metrics_backlog", "gauge", "Days that changed since their jobs' metrics were computed.",
                 [((("cluster", name),), len(store.of(name).peek_open_days())) for name in clusters])  # fmt: skip


def _of_advice(told: dict[str, AdviceOutcomes]) -> Iterator[Metric]:
    yield family(
        "almanac_advice_jobs", "gauge",
        f"Jobs of the last {WINDOW_DAYS} days that were advised a memory tier, by what they asked for.",
        [((("cluster", name), ("outcome", outcome)), number)
         for name, each in told.items() for outcome, number in each.outcomes.items()],
    )  # fmt: skip
    for name, about in (
        ("jobs", "Ended jobs of the last {} days whose duration had been forecast."),
        ("median_abs_log_error", "Median over these of |ln(forecast / run time)|."),
        ("share_within_2x", "Share of these that took between half and twice the forecast."),
    ):
        values = [(cluster, getattr(each, name)) for cluster, each in told.items() if each.jobs]
        yield family(f"almanac_forecast_{name}", "gauge", about.format(WINDOW_DAYS),
                     [((("cluster", cluster),), value) for cluster, value in values])  # fmt: skip


def _of_running(live: dict[str, LiveJobs | None]) -> Iterator[Metric]:
    held, idle = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for cluster, found in live.items():
        for job in found.jobs if found else ():
            held[cluster, job.partition] += job.gpu_count
            idle[cluster, job.partition] += job.idle_gpus
    for name, about, numbers in (
        ("gpus", "GPUs of running jobs in the last round of the watch, by partition.", held),
        ("idle_gpus", "Those of them that the watch found idle.", {key: idle[key] for key in held}),
    ):
        yield family(
            f"almanac_watch_{name}",
            "gauge",
            about,
            [((("cluster", key[0]), ("partition", key[1])), number) for key, number in sorted(numbers.items())],
        )


def _of_nodes(store: Store, clusters: Sequence[str], now_s: int) -> Iterator[Metric]:
    failed = Counter[tuple[str, str]]()
    since_s = now_s - WINDOW_DAYS * DAY_S
    for cluster in clusters:
        found = node_failures(store.of(cluster), since_s, now_s, since_s - WINDOW_DAYS * DAY_S)
        failed.update((cluster, failure.node) for failure in found)
    yield family(
        "almanac_node_failures",
        "gauge",
        f"Jobs that a node ended in the last {WINDOW_DAYS} days.",
        [((("cluster", key[0]), ("node", key[1])), number) for key, number in failed.most_common(MOST_NODES)],
    )


def load_outcomes(store: ClusterStore, now_s: int) -> AdviceOutcomes:
    """Compare the users' own advice files with the jobs of the last WINDOW_DAYS. Raises StoreError."""
    with store.connect() as db:
        load_told(db, store, now_s - WINDOW_DAYS * DAY_S, now_s)
        outcomes = dict(db.execute(_OUTCOMES).fetchall())
        [errors] = db.execute(_ERRORS).fetchall()
    return AdviceOutcomes(outcomes, *errors)
