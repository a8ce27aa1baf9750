"""Which unit carried which UUID, for bindings that name GPUs so."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from telemetry.attribution.bindings import Binding, Unit
from telemetry.store.schema import schema_of

_COLUMNS = schema_of(
    {"host": pa.string(), "gpu": pa.int16(), "mig": pa.string(), "time_ms": pa.int64(), "uuid": pa.string()}
)
_NAMES = """
SELECT DISTINCT host, time_ms // 86400000 AS day, uuid, gpu, mig
FROM (SELECT * FROM read_parquet($files, union_by_name=true, hive_partitioning=false)
      UNION ALL BY NAME SELECT * FROM no_samples)
WHERE uuid IS NOT NULL AND host IN (SELECT host FROM wanted)
"""


def unit_names(
    db: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    bindings: Sequence[Binding],
    nodes: Mapping[int, Mapping[str, str]],
) -> Mapping[tuple[str, int], frozenset[tuple[str, Unit]]]:
    """UUIDs of the units of each (node, day since 1970), on the nodes whose bindings have UUIDs; {} without any.

    nodes: by day, the Slurm node of each host with another name in telemetry.
    """
    wanted = {binding.host for binding in bindings if binding.uuid}
    if not wanted or not files:
        return {}
    others = {host for of_day in nodes.values() for host, node in of_day.items() if node in wanted}
    db.register("wanted", pa.table({"host": sorted(wanted | others)}))
    db.register("no_samples", _COLUMNS.empty_table())  # a file need not have every column
    rows = db.sql(_NAMES, params={"files": [str(path) for path in files]}).to_arrow_table().to_pylist()
    found: dict[tuple[str, int], set[tuple[str, Unit]]] = defaultdict(set)
    for row in rows:
        node = nodes.get(row["day"], {}).get(row["host"], row["host"])
        found[node, row["day"]].add((row["uuid"], (row["gpu"], row["mig"])))
    db.unregister("wanted")
    db.unregister("no_samples")
    return {key: frozenset(names) for key, names in found.items()}
