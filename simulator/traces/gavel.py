"""Gavel's traces: training jobs by type and number of steps, whose run times follow from a file of throughputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from almanac.errors import FileFormatError

_PLACES = {7: (4, 6, 5), 10: (5, 6, 9)}
"""Number of fields to the places of steps, GPUs, and arrival, as the two versions of Gavel write them."""
GPU_TYPES = ("v100", "p100", "k80")


def is_gavel(start: bytes) -> bool:
    """Whether the first line has Gavel's fields."""
    fields = start.split(b"\n")[0].decode("utf-8", "replace").split("\t")
    return _row(fields) is not None


def read_gavel(path: Path, throughputs: Path) -> tuple[pd.DataFrame, Mapping[str, int]]:
    """Records for make_workload, and reason to number of lines that are no job.

    A job runs for its steps divided by its type's steps/s on the fastest GPU type of the file of throughputs. `kind` is
    its type. Raises FileFormatError if one of the files cannot be used.
    """
    steps_s = _steps_per_second(throughputs)
    excluded: Counter[str] = Counter()
    rows = []
    for line in _text(path).splitlines():
        fields = line.split("\t")
        row = _row(fields)
        if row is None:
            excluded["not a line of Gavel's fields"] += 1
            continue
        steps, gpus, submit_s = row
        rate = steps_s.get((fields[0], int(gpus)))
        if not rate:
            excluded["of an unknown type"] += 1
            continue
        rows.append((submit_s, steps / rate, gpus, fields[0], fields[0]))
    return pd.DataFrame(rows, columns=["submit_s", "run_s", "gpu_count", "kind", "name"]), excluded


def _row(fields: Sequence[str]) -> tuple[float, float, float] | None:
    places = _PLACES.get(len(fields))
    try:
        steps, gpus, submit_s = (float(fields[place]) for place in places or ())
    except ValueError:
        return None
    return (steps, gpus, submit_s) if 0 < gpus < 2**20 else None


def _steps_per_second(path: Path) -> dict[tuple[str, int], float]:
    """Steps/s by type and GPUs, of jobs alone on consolidated GPUs of the first of GPU_TYPES in the file."""
    try:
        content = json.loads(_text(path))
        table = next(content[name] for name in GPU_TYPES if name in content)
        found = {}
        for key, rates in table.items():
            kind, gpus = key.removeprefix("('").removesuffix(")").rsplit("', ", 1)
            found[kind, int(gpus)] = float(rates["null"])
    except (StopIteration, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FileFormatError(
            f"{path}: is not a file of Gavel's throughputs", f"give one with a table {', or '.join(GPU_TYPES)}"
        ) from error
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error
