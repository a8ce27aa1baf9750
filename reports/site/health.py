"""The site report's table of nodes that fail jobs, and of the mean time to failure."""

from __future__ import annotations

from advisor.health.record import MOST_NODES, NODE_COLUMNS, SiteHealth, drain_command
from almanac.units import DAY_S, counted, format_duration, printable
from reports.site.words import PageTable


def health_table(found: SiteHealth) -> PageTable | str:
    """Return the nodes with failures, highest chance of a lemon first, or a sentence if no job failed by a node."""
    days = round((found.until_s - found.since_s) / DAY_S)
    if not found.failures:
        return f"No job is known to have failed by a node in the last {counted(days, 'day')}."
    lemons = [
        f"{printable(node.node, 60)}: {printable(found.evidence(node), 400)}. Drain it: {drain_command(node)}."
        for node in found.lemons[:MOST_NODES]
    ]
    sizes = "; ".join(
        f"{size.to_gpus} GPUs {format_duration(3600 * size.mttf_h)} ({format_duration(3600 * size.low_h)} to "
        f"{format_duration(3600 * size.high_h)})"
        for size in found.sizes
        if size.mttf_h is not None
    )
    note = (
        f"{counted(len(found.failures), 'job')} failed by a node in {counted(days, 'day')}; docs/health.md says what "
        f"counts. Mean time to failure of a job with up to so many GPUs, with its 95% interval: {sizes}."
    )
    return PageTable([name.capitalize() for name in NODE_COLUMNS], found.rows(), " ".join([*lemons, note]))
