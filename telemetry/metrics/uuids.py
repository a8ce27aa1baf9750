"""Which unit carried which UUID, for bindings that name GPUs so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from telemetry.bindings import Binding, Unit
from telemetry.metrics.samples import rows, source_sql

_NAMES = """
SELECT DISTINCT t.host, t.time_ms // 86400000 AS day, t.uuid, t.gpu, t.mig
FROM {source} t SEMI JOIN wanted w ON t.host = w.host
WHERE t.uuid IS NOT NULL
"""


def unit_names(
    db: duckdb.DuckDBPyConnection, files: Sequence[Path], bindings: Sequence[Binding]
) -> Mapping[tuple[str, int], frozenset[tuple[str, Unit]]]:
    """UUIDs of the units of each (host, day since 1970), on the hosts whose bindings have UUIDs; {} without any."""
    hosts = sorted({binding.host for binding in bindings if binding.uuid})
    if not hosts or not files:
        return {}
    db.register("wanted", pa.table({"host": hosts}))
    found: dict[tuple[str, int], set[tuple[str, Unit]]] = defaultdict(set)
    for row in rows(db, _NAMES.format(source=source_sql(files))).to_pylist():
        found[row["host"], row["day"]].add((row["uuid"], (row["gpu"], row["mig"])))
    db.unregister("wanted")
    return {key: frozenset(names) for key, names in found.items()}
