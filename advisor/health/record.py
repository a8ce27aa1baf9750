"""The record of a site's failures: rates of its nodes, MTTF by number of GPUs, and what to do about lemons."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from advisor.health.checkpoints import (
    LEAST_GPU_S,
    CheckpointAdvice,
    Exposure,
    FailureRate,
    Mttf,
    advise_checkpoints,
    failure_rate,
    mttf_by_gpus,
)
from advisor.health.nodes import NodeRate, NodeRecord, incidents, node_rates
from almanac.units import DAY_S, counted, format_count, json_value, printable
from telemetry.health.failures import JobFailure, gpu_exposure, node_days, node_failures
from telemetry.store.store import ClusterStore

WINDOW_DAYS = 30
"""Days of the record that rates come from: long enough for some failures, short enough to forget repaired nodes."""
_LONGEST_DAYS = 31
"""Jobs that were submitted longer before the window are not read."""


MOST_NODES = 10
NODE_COLUMNS = ("node", "failures", "days with jobs", "rate in 30 days", "other nodes", "chance of 5x")
"""Names of the columns of SiteHealth.rows."""


@dataclass(frozen=True)
class SiteHealth:
    """Failures of [since_s, until_s), by time, and the rates that follow. nodes: highest chance of a lemon first."""

    since_s: int
    until_s: int
    failures: Sequence[JobFailure]
    nodes: Sequence[NodeRate]
    sizes: Sequence[Mttf]
    rate: FailureRate

    @property
    def lemons(self) -> list[NodeRate]:
        return [node for node in self.nodes if node.is_lemon]

    @cached_property
    def by_node(self) -> dict[str, list[JobFailure]]:
        found: dict[str, list[JobFailure]] = defaultdict(list)
        for failure in self.failures:
            found[failure.node].append(failure)
        return dict(found)

    def rows(self) -> list[list[str]]:
        """The first nodes with failures as texts, for a terminal and a page: NODE_COLUMNS."""
        return [
            [printable(node.node, 60), format_count(node.failures), f"{node.days:.0f}", f"{node.rate_30d:.2g}",
             f"{node.others_30d:.2g}", f"{node.chance:.1%}"]
            for node in self.nodes if node.failures
        ][:MOST_NODES]  # fmt: skip

    def evidence(self, node: NodeRate) -> str:
        """ "15 failures on 30 days (others 0.2 in 30 days): 12 of XID 79, the GPU fell off the bus; 3 of NODE_FAIL"."""
        causes = Counter(
            (each.code, each.error.about if each.error else each.state) for each in self.by_node[node.node]
        )
        parts = [
            f"{number} {'of ' + code + ', ' if code else ''}{about}" for (code, about), number in causes.most_common(3)
        ]
        last = max(each.time_s for each in self.by_node[node.node])
        ago = (self.until_s - last) // DAY_S
        when = "today" if ago < 1 else f"{counted(ago, 'day')} ago"
        return (
            f"{counted(node.failures, 'failure')} on {counted(round(node.days), 'day')} with jobs "
            f"(other nodes: {node.others_30d:.2g} in 30 days): {'; '.join(parts)}; the last {when}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as `almanac health --json` prints them."""
        nodes = [node for node in self.nodes if node.failures]
        return {
            "since_s": self.since_s,
            "until_s": self.until_s,
            "lemons": [vars(node) | {"evidence": self.evidence(node), "drain": drain_command(node)}
                       for node in self.lemons],
            "nodes": [vars(node) for node in nodes],
            "mttf": [{name: json_value(value) for name, value in vars(size).items()} for size in self.sizes],
            "failures": [vars(failure) | _meaning(failure) for failure in self.failures],
        }  # fmt: skip


def _meaning(failure: JobFailure) -> dict[str, Any]:
    error = failure.error
    return {"cause": error.cause if error else "node", "about": error.about if error else failure.state}


def site_health(store: ClusterStore, until_s: int, days: int = WINDOW_DAYS) -> SiteHealth:
    """Read the failures of the last days. Raises StoreError."""
    span = _span(until_s, days)
    failures = node_failures(store, *span)
    exposures = _exposures(gpu_exposure(store, *span), failures)
    times: dict[str, list[int]] = defaultdict(list)
    for failure in failures:
        times[failure.node].append(failure.time_s)
    records = [
        NodeRecord(node, of_node, len(incidents(times[node]))) for node, of_node in node_days(store, *span).items()
    ]
    return SiteHealth(*span[:2], failures, node_rates(records), mttf_by_gpus(exposures), failure_rate(exposures))


def site_rate(store: ClusterStore, until_s: int) -> FailureRate:
    """The failures of a site's jobs on their GPU-hours, without a rating of nodes. Raises StoreError."""
    span = _span(until_s, WINDOW_DAYS)
    return failure_rate(_exposures(gpu_exposure(store, *span), node_failures(store, *span)))


def _span(until_s: int, days: int) -> tuple[int, int, int]:
    """Start and end of the record, and the earliest submission of its jobs."""
    since_s = until_s - days * DAY_S
    return since_s, until_s, since_s - _LONGEST_DAYS * DAY_S


_Key = TypeVar("_Key")


def stored_checkpoints(
    store: ClusterStore, now_s: int, sizes: Mapping[_Key, tuple[int, float]], cost_s: float
) -> dict[_Key, CheckpointAdvice]:
    """Advice for jobs by their number of GPUs and run time, s. Reads nothing if all are too small to meet a failure."""
    large = {key: size for key, size in sizes.items() if size[0] * size[1] >= LEAST_GPU_S}
    if not large:
        return {}
    rate = site_rate(store, now_s)
    return {key: advice for key, size in large.items() if (advice := advise_checkpoints(rate, *size, cost_s))}


def _exposures(hours: Iterable[tuple[int, float]], failures: Sequence[JobFailure]) -> list[Exposure]:
    failed = Counter(failure.gpu_count for failure in failures)
    return [Exposure(gpus, each, failed[gpus]) for gpus, each in hours]


def drain_command(node: NodeRate) -> str:
    """The command that an operator can run: almanac never runs it by itself."""
    reason = f"almanac: {format_count(node.failures)} failures, other nodes {node.others_30d:.2g} in 30 days"
    return shlex.join(["scontrol", "update", f"nodename={node.node}", "state=drain", f"reason={reason}"])
