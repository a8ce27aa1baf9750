"""Trace files of jobs of one GPU or slice: CSV, JSON, or Parquet."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from advisor.mig.sizes import WHOLE, sizes_of
from almanac.errors import FileFormatError
from almanac.mig import MigModel, profile_name
from almanac.plain_file import parse_json, read_plain
from simulator.mig.demand import SliceRequest, shape_of
from telemetry.store.probe import require_readable


def read_trace(path: Path, model: MigModel) -> tuple[list[SliceRequest], Mapping[str, int]]:
    """The jobs by submit time, the first one at 0 s, and why rows were left out, with their number.

    Columns: submit_s; run_s, the run time on a full GPU; and either shape ("1g", "2g.10gb", "gpu") or memory_gib.
    compute: compute slices that the job keeps busy, such as 4.65. Without it a job runs equally long on its own shape
    and on larger ones; with memory_gib alone, the memory decides. Raises FileFormatError for a file without jobs.
    """
    left_out: Counter[str] = Counter()
    jobs = []
    for row in _rows(path):
        job = _job(row, model)
        if isinstance(job, str):
            left_out[job] += 1
        else:
            jobs.append(job)
    if not jobs:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "no row"
        raise FileFormatError(
            f"{path}: no job to simulate ({reasons})", "give the columns submit_s, run_s, and shape or memory_gib"
        )
    first_s = min(job.submit_s for job in jobs)
    moved = [SliceRequest(job.submit_s - first_s, job.full_s, job.shape, job.compute) for job in jobs]
    return sorted(moved, key=lambda job: job.submit_s), dict(left_out)


def _rows(path: Path) -> Iterable[Mapping[str, Any]]:
    try:
        if path.suffix.lower() == ".parquet":
            from pyarrow import parquet

            require_readable(path)
            rows: Any = parquet.read_table(path).to_pylist()
        elif path.suffix.lower() in (".json", ".jsonl"):
            text = read_plain(path).decode("utf-8")
            is_list = text.lstrip().startswith("[")
            texts = [text] if is_list else [line for line in text.splitlines() if line.strip()]
            rows = [parse_json(each.encode()) for each in texts]
            rows = rows[0] if is_list else rows
        else:
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise FileFormatError(f"{path} cannot be read: {error}", "give a CSV, JSON, or Parquet file") from error
    return [row for row in rows if isinstance(row, Mapping)]


def _job(row: Mapping[str, Any], model: MigModel) -> SliceRequest | str:
    """The job of a row, or why there is none."""
    submit_s, run_s = _number(row.get("submit_s")), _number(row.get("run_s"))
    if submit_s is None or run_s is None or run_s <= 0:
        return "without submit_s and a positive run_s"
    compute = _number(row.get("compute"))
    if compute is not None and not 0 <= compute <= model.compute_slices:
        return f"with compute outside 0..{model.compute_slices}"
    shape = _shape(row, model, compute)
    if shape is None:
        return "without a shape of the model or memory_gib that fits"
    sizes = sizes_of(model)
    own = sizes.compute[sizes.shapes.index(shape)]
    return SliceRequest(submit_s, run_s, shape, float(own) if compute is None else compute)


def _shape(row: Mapping[str, Any], model: MigModel, compute: float | None) -> str | None:
    sizes = sizes_of(model)
    named = row.get("shape")
    if isinstance(named, str) and named.strip():
        name = named.strip().lower()
        if name in (WHOLE, "full", "whole"):
            return WHOLE
        profile = model.profile(profile_name(name) or name)
        shape = WHOLE if profile == model.whole else profile.shape if profile else ""
        return shape if shape in sizes.shapes else None
    memory_gib = _number(row.get("memory_gib"))
    whole_gib = model.whole.memory_gib
    if memory_gib is None or memory_gib < 0 or (whole_gib and memory_gib > whole_gib[1]):
        return None
    return shape_of(model, memory_gib, 0.0 if compute is None else compute)


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
