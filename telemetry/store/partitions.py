"""Which partition file of the store a row belongs to, which files a table has, and what else lies among them."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry.store.marks import is_safe_name
from telemetry.store.schema import Table

CLUSTER = "cluster="
_DATE = re.compile(r"date=([0-9]{4}-[0-9]{2}-[0-9]{2})")
_TIME = re.compile(r"([0-9]{2})([0-9]{2})\.parquet")


@dataclass(frozen=True)
class Stray:
    """Something among a store's files that is left out, and what is wrong with it.

    is_damaged: it is in the place of a file of the store; else the store did not put it there.
    """

    path: Path
    reason: str
    is_damaged: bool = False


def partition_start(path: Path) -> int:
    """Start of a partition file, s since 1970. Raises ValueError where its name is not that of one."""
    date, time = _DATE.fullmatch(path.parent.name), _TIME.fullmatch(path.name)
    if not date or not time:
        raise ValueError(f"{path} is no date=YYYY-MM-DD/HHMM.parquet")
    return int(dt.datetime.fromisoformat(f"{date[1]}T{time[1]}:{time[2]}:00+00:00").timestamp())


def cluster_folders(table: Path) -> tuple[list[Path], list[Stray]]:
    """The folders of a table's clusters, in order, and the strays beside them."""
    return _sorted_out(table, _cluster_fault, of_folders=True)


def partition_files(cluster: Path) -> tuple[list[Path], list[Stray]]:
    """The partition files of one cluster's folder in time order, and the strays among them."""
    files: list[Path] = []
    days, strays = _sorted_out(cluster, _day_fault, of_folders=True)
    for day in days:
        found, more = _sorted_out(day, _time_fault, of_folders=False)
        files += found
        strays += more
    return files, strays


def _cluster_fault(path: Path) -> str:
    is_named = path.name.startswith(CLUSTER) and is_safe_name(path.name.removeprefix(CLUSTER))
    return "" if is_named else "its name is not cluster=NAME"


def _day_fault(path: Path) -> str:
    return "" if _is_start(path / "0000.parquet") else "its name is not date=YYYY-MM-DD"


def _time_fault(path: Path) -> str:
    return "" if _is_start(path) else "its name is not HHMM.parquet"


def _is_start(path: Path) -> bool:
    try:
        partition_start(path)
    except ValueError:
        return False
    return True


def _sorted_out(folder: Path, name_fault: Callable[[Path], str], *, of_folders: bool) -> tuple[list[Path], list[Stray]]:
    """What a folder holds, in order, and its strays. Hidden names are neither: half-written files, NFS's, editors'."""
    try:
        with os.scandir(folder) as entries:
            shown = sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda one: one.name)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [Stray(folder, f"it cannot be listed: {error.strerror}")]
    faults = [(Path(one.path), name_fault(Path(one.path)) or _kind_fault(one, of_folders)) for one in shown]
    return [path for path, fault in faults if not fault], [Stray(path, fault) for path, fault in faults if fault]


def _kind_fault(entry: os.DirEntry[str], is_folder: bool) -> str:
    """Empty where it is a folder, or a regular file, as it should be; no stat but for links."""
    try:
        if entry.is_dir() if is_folder else entry.is_file():
            return ""
    except OSError as error:
        return f"a link that leads nowhere: {error.strerror}"
    return "not a folder" if is_folder else "not a regular file"


def by_partition(spec: Table, rows: pa.Table) -> Iterator[tuple[int, pa.Table]]:
    """Start (s) of each partition that rows belong to, in time order, and its rows in the order given."""
    part = rows[spec.time_column].to_numpy() // (spec.part_s * spec.ticks_per_s)
    if (part[1:] < part[:-1]).any():
        order = np.argsort(_narrow(part), kind="stable")
        rows, part = rows.combine_chunks().take(order), part[order]
    borders = [*np.flatnonzero(np.diff(part, prepend=part[:1] - 1)).tolist(), len(part)]
    for first, end in itertools.pairwise(borders):
        yield int(part[first]) * spec.part_s, rows.slice(first, end - first)


def _narrow(part: npt.NDArray[np.int64]) -> npt.NDArray[np.integer]:
    """Numbers in the same order, of a type that NumPy sorts by radix where they are close."""
    first = part.min()
    return (part - first).astype(np.uint16) if part.max() - first < 2**16 else part


def of_times(spec: Table, files: Sequence[Path], times: pa.Array[Any]) -> list[Path]:
    """Those of the partition files that can hold rows of these times, in the unit of the table's time column."""
    starts = set((np.unique(times.to_numpy() // (spec.part_s * spec.ticks_per_s)) * spec.part_s).tolist())
    return [path for path in files if partition_start(path) in starts]


def span_ticks(spec: Table, since_s: int | None, until_s: int | None) -> tuple[int, int]:
    """A span in the unit of the table's time column; where it has no end, beyond every time."""
    low = -(2**62) if since_s is None else since_s * spec.ticks_per_s
    return low, 2**62 if until_s is None else until_s * spec.ticks_per_s
