"""A source of each Prometheus server that is read for a site."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pyarrow as pa

from almanac.config import Prometheus
from almanac.errors import ConfigError
from slurm.nodes import partition_nodes
from telemetry.site import Site
from telemetry.sources.prometheus import PrometheusSource
from telemetry.sources.shared_nodes import SharedNodes

MOST_AT_ONCE = 4
"""Servers that are asked at once. They share the samples that may be in memory."""


def read_servers(
    site: Site, section: Prometheus, hosts: Collection[str], writing: AbstractContextManager[Any]
) -> Sequence[PrometheusSource]:
    """The sources, in the configuration's order. writing: held by who writes to the store.

    hosts: nodes to read; () for all. Raises ConfigError if no server is configured.
    """
    store = site.store
    chosen = [each for each in section.servers if not each.cluster or each.cluster == store.cluster]
    if not chosen:
        raise ConfigError("no Prometheus is configured", "set prometheus.url")
    share = min(len(chosen), MOST_AT_ONCE)
    sources = [
        PrometheusSource(
            replace(each, max_samples=each.max_samples // share),
            hosts=hosts,
            partition_nodes=lambda partitions: partition_nodes(site.commands, partitions),
        )
        for each in chosen
    ]

    def stored(start_s: int, end_s: int) -> pa.Table:
        with writing:
            return store.read("telemetry", ["host", "time_ms"], start_s, end_s)

    if len(sources) > 1:
        shared = SharedNodes(sources, {each.name: store.watermark(each.name) for each in sources}, stored)
        for each in sources:
            each.shared = shared
    return sources
