"""The site report's table of nodes that fail jobs, and of the mean time to failure."""

from __future__ import annotations

import math

from advisor.health.record import SiteHealth, drain_command
from almanac.units import DAY_S, counted, format_count, format_duration, printable
from reports.site.words import NOT_KNOWN, PageTable

MOST_NODES = 10


def health_table(found: SiteHealth) -> PageTable | str:
    """Return the nodes with failures, highest chance of a lemon first, or a sentence if no job failed by a node."""
    days = round((found.until_s - found.since_s) / DAY_S)
    if not found.failures:
        return f"No job is known to have failed by a node in the last {counted(days, 'day')}."
    nodes = [node for node in found.nodes if node.failures][:MOST_NODES]
    cells = [
        [printable(node.node, 60), format_count(node.failures), f"{node.days:.0f}", f"{node.rate_30d:.2g}",
         f"{node.others_30d:.2g}", f"{node.chance:.1%}"]
        for node in nodes
    ]  # fmt: skip
    lemons = [
        f"{printable(node.node, 60)}: {printable(found.evidence(node), 400)}. Drain it: {drain_command(node)}."
        for node in found.lemons[:MOST_NODES]
    ]
    sizes = "; ".join(
        f"{size.to_gpus} GPUs {format_duration(3600 * size.mttf_h)} ({format_duration(3600 * size.low_h)} to "
        f"{format_duration(3600 * size.high_h) if size.high_h < math.inf else NOT_KNOWN})"
        for size in found.sizes
        if size.mttf_h is not None
    )
    note = (
        f"{counted(len(found.failures), 'job')} failed by a node in {counted(days, 'day')}; docs/health.md says what "
        f"counts. Mean time to failure of a job with up to so many GPUs, with its 95% interval: {sizes}."
    )
    columns = ("Node", "Failures", "Days with jobs", "Rate in 30 days", "Other nodes", "Chance of 5 times the rate")
    return PageTable(columns, cells, " ".join([*lemons, note]))
