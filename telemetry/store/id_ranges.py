"""Which partition files can hold a job id: from the smallest and largest ids in their footers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

IDS = ("job_id", "array_job_id")
MOST_IDS = 100
"""With more ids, most files can hold one of them, and a look into each footer does not pay."""


def of_ids(files: Sequence[Path], among: Mapping[str, pa.Array[Any]]) -> list[Path]:
    """Those of the files that can hold rows with the wanted ids. A file without a readable footer stays."""
    few = {name: among[name].drop_null() for name in IDS if name in among and len(among[name]) <= MOST_IDS}
    wanted: dict[str, list[Any]] = {name: values.to_pylist() for name, values in few.items()}
    return [path for path in files if _can_hold(path, wanted)] if wanted else list(files)


def _can_hold(path: Path, wanted: Mapping[str, Sequence[int]]) -> bool:
    try:
        found = path.stat()
        ranges = _ranges(path, (found.st_ino, found.st_mtime_ns, found.st_size))
    except (OSError, pa.ArrowException):
        return True
    return all(
        name not in ranges or any(one in part for part in ranges[name] for one in ids) for name, ids in wanted.items()
    )


@functools.lru_cache(maxsize=4096)
def _ranges(path: Path, state: tuple[int, ...]) -> dict[str, list[range]]:
    """By column, the ids that each row group can hold. A column without statistics is left out.

    state: of the file, so that a replaced file is looked at again.
    """
    footer = pq.read_metadata(path)
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    found = {name: [_range(group, name) for group in groups] for name in IDS}
    return {name: [part for part in parts if part is not None] for name, parts in found.items() if None not in parts}


def _range(group: pq.RowGroupMetaData, name: str) -> range | None:
    columns = (group.column(place) for place in range(group.num_columns))
    held: Any = next((column.statistics for column in columns if column.path_in_schema == name), None)
    if held is None or not held.has_null_count:
        return None
    if not held.num_values:
        return range(0)
    return range(held.min, held.max + 1) if held.has_min_max else None
