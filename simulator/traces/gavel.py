"""Gavel's traces: training jobs by type and number of steps, whose run times follow from a file of throughputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from almanac.errors import FileFormatError
from almanac.plain_file import parse_json

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
    table, excluded = read_gavel_rates(path, throughputs, ())
    run_s = table["steps"] / table["rates"].str[0].astype(float)
    jobs = table.assign(run_s=run_s, name=table["kind"])[["submit_s", "run_s", "gpu_count", "kind", "name"]]
    return jobs, excluded


def read_gavel_rates(path: Path, throughputs: Path, types: Sequence[str]) -> tuple[pd.DataFrame, Mapping[str, int]]:
    """submit_s, steps, gpu_count, kind, and rates (steps/s of the gang on each of the types), by submission.

    types: GPU types in the file of throughputs; () for the fastest one alone. Second: reason to number of lines that
    are no job; jobs that run on none of the types are of an unknown type. Raises FileFormatError if one of the files
    cannot be used, or has none of a type.
    """
    steps_s = read_gavel_types(throughputs, types)
    excluded: Counter[str] = Counter()
    rows = []
    for line in _text(path).splitlines():
        fields = line.split("\t")
        row = _row(fields)
        if row is None:
            excluded["not a line of Gavel's fields"] += 1
            continue
        steps, gpus, submit_s = row
        rates = [of_type.get((fields[0], int(gpus)), 0.0) for of_type in steps_s]
        if not any(rates):
            excluded["of an unknown type"] += 1
            continue
        rows.append((submit_s, steps, gpus, fields[0], rates))
    table = pd.DataFrame(rows, columns=["submit_s", "steps", "gpu_count", "kind", "rates"])
    return table.sort_values("submit_s", kind="stable", ignore_index=True), excluded


def _row(fields: Sequence[str]) -> tuple[float, float, float] | None:
    places = _PLACES.get(len(fields))
    try:
        steps, gpus, submit_s = (float(fields[place]) for place in places or ())
    except ValueError:
        return None
    return (steps, gpus, submit_s) if 0 < gpus < 2**20 else None


def read_gavel_types(path: Path, types: Sequence[str]) -> list[dict[tuple[str, int], float]]:
    """For each type, steps/s by kind and GPUs, of jobs alone on consolidated GPUs; () for the first of GPU_TYPES."""
    try:
        content = parse_json(_text(path).encode())
        known = [name for name in content if isinstance(content[name], dict)]
        wanted = types or [next(name for name in GPU_TYPES if name in content)]
        if absent := [name for name in wanted if name not in known]:
            raise FileFormatError(f"{path}: has no GPU type {absent[0]}", f"use types of {', '.join(known)}")
        return [_of_type(content[name]) for name in wanted]
    except (StopIteration, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(
            f"{path}: is not a file of Gavel's throughputs", f"give one with a table {', or '.join(GPU_TYPES)}"
        ) from error


def _of_type(table: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, int], float]:
    found = {}
    for key, rates in table.items():
        kind, gpus = key.removeprefix("('").removesuffix(")").rsplit("', ", 1)
        rate = float(rates["null"])
        found[kind, int(gpus)] = rate if 0 < rate < float("inf") else 0.0
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileFormatError(
            f"{path}: cannot be read: {error.strerror}", "check the path and its permissions"
        ) from error
