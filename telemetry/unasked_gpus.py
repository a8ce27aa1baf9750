"""GPUs that a job got without asking: whole nodes come with all their GPUs (--exclusive, or the partition's rule)."""

from __future__ import annotations

import math

SQL = """CASE WHEN gpu_count > 0 AND gpu_count_req IS NOT NULL THEN greatest(gpu_count - ceil(gpu_count_req
  * greatest(coalesce(node_count / nullif(node_count_req, 0), 1), 1)), 0)::BIGINT END"""
"""As unasked_gpus, of rows of the table jobs. DuckDB's greatest passes over nulls."""


def unasked_gpus(
    given: int | None, asked: int | None, nodes: int | None = None, nodes_asked: int | None = None
) -> int | None:
    """Return the GPUs given and not asked for; None if the job has none, or if it is not known what it asked for.

    A job that got more nodes than the fewest it asked for gets the GPUs that it asked for on each of them.
    """
    if not given or asked is None:
        return None
    more_nodes = max(nodes / nodes_asked, 1) if nodes and nodes_asked else 1
    return max(given - math.ceil(asked * more_nodes), 0)
