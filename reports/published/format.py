"""The format of published reports: one file with the list of a user's jobs, and one file for each report.

A file is gzip. It holds a line of JSON, and in a report also the samples. docs/own-reports.md describes format 3. Files
are data only, and are shown only to the user who could have changed them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np

from advisor.decisions.packing import PackingAdvice
from almanac.config import Tier
from almanac.errors import FileFormatError
from almanac.plain_file import parse_json
from almanac.records import (
    Advice,
    Duration,
    ExpectedWait,
    MemoryBound,
    MemoryEvidence,
    PriorityAdvice,
    Request,
    TierAdvice,
)
from reports.job.context import JobContext
from reports.job.ranks import Rank
from reports.job.series import COUNTERS, Floats, GpuSeries
from reports.published.packing_row import packing_of, packing_row
from telemetry.store.schema import TABLES

FORMAT = 3
"""Raise it with every change that older programs cannot read, such as a new field in the records of an advice."""
MAX_FILE_BYTES, MAX_BYTES = 16 << 20, 64 << 20
"""Largest size of a file, and of its unpacked content."""
_UNITS = {"hbm_used_mib": np.float32(16.0)}
"""Half floats end at 65504, so memory is stored in units of 16 MiB."""
Row = Mapping[str, Any]
"""A row of any table of the store, by column."""
_Record = TypeVar("_Record")


@dataclass(frozen=True)
class OwnRun:
    """A run in the list. report: the name of its file; None if there is none yet."""

    job_id: int
    submit_s: int
    end_s: int
    array_job_id: int | None
    array_task_id: int | None
    gpu_count: int | None
    report: str | None


@dataclass(frozen=True)
class OwnIndex:
    """A user's list. history: rows of telemetry.history.HISTORY without their unknown values, oldest end first."""

    cluster: str
    user: str
    written_s: int
    runs: tuple[OwnRun, ...]
    history: tuple[Row, ...]


def pack_index(index: OwnIndex) -> bytes:
    runs = [asdict(run) for run in index.runs]
    return _pack("jobs", {**vars(index), "runs": runs, "history": list(map(_known, index.history))})


def unpack_index(content: bytes) -> OwnIndex:
    """Raises FileFormatError."""
    document, _ = _unpack("jobs", content)
    try:
        return OwnIndex(
            cluster=document["cluster"],
            user=document["user"],
            written_s=int(document["written_s"]),
            runs=tuple(OwnRun(**run) for run in document["runs"]),
            history=tuple(document["history"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(error) from error


def pack_report(context: JobContext) -> bytes:
    """The file of a report, without the samples that no form of the report shows. Raises ValueError for NaN."""
    series, samples = _pack_series(context)
    document = {
        "cluster": context.cluster,
        "now_s": context.now_s,
        "job": _known(context.job),
        "metrics": _known(context.metrics),
        "gpus": list(map(_known, context.gpus)),
        "earlier_runs": list(map(_known, context.earlier_runs)),
        "ranks": {name: asdict(rank) for name, rank in context.ranks.items()},
        "advice": None if context.advice is None else _advice_row(context.advice),
        "packing": None if context.packing is None else packing_row(context.packing),
        "tiers": list(map(_tier_row, context.tiers)),
        "series": series,
    }
    return _pack("report", document, samples)


def unpack_report(content: bytes) -> JobContext:
    """Raises FileFormatError."""
    document, samples = _unpack("report", content)
    try:
        return JobContext(
            cluster=document["cluster"],
            now_s=int(document["now_s"]),
            job=_row("jobs", document["job"]),
            metrics=_row("job_metrics", document["metrics"]) if document["metrics"] else {},
            gpus=tuple(_row("gpu_metrics", row) for row in document["gpus"]),
            series=_series(document["series"], samples),
            ranks={name: Rank(**rank) for name, rank in document["ranks"].items()},
            advice=None if document["advice"] is None else _advice(document["advice"]),
            packing=_packing(document.get("packing")),
            tiers=tuple(Tier(**tier) for tier in document["tiers"]),
            earlier_runs=tuple(_row("jobs", row) for row in document["earlier_runs"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise _malformed(error) from error


def _packing(values: Mapping[str, Any] | None) -> PackingAdvice | None:
    """None too in files of older programs, and where a newer one's cannot be read: the report does not depend on it."""
    try:
        return None if values is None else packing_of(values)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _pack(kind: str, document: Mapping[str, Any], payload: bytes = b"") -> bytes:
    line = json.dumps({"almanac": kind, "format": FORMAT, **document}, allow_nan=False, separators=(",", ":"))
    return gzip.compress(line.encode("ascii") + b"\n" + payload, 6, mtime=0)


def _unpack(kind: str, content: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        stream = zlib.decompressobj(wbits=31)
        whole = stream.decompress(content, MAX_BYTES + 1)
        line, _, payload = whole.partition(b"\n")
        document = parse_json(line) if len(whole) <= MAX_BYTES else None
        if document and (not stream.eof or stream.unused_data):  # zlib compares the checksum at the end
            raise ValueError("it is cut off")
    except (zlib.error, ValueError) as error:
        raise _malformed(error) from error
    if not isinstance(document, dict) or document.get("almanac") != kind:
        raise _malformed("not a file of this kind, or too large")
    if document.get("format") != FORMAT:
        raise FileFormatError(
            f"format {document.get('format')!r}, expected {FORMAT}",
            "use the almanac version that publishes here, or wait for the next `almanac publish`",
        )
    return document, payload


def _malformed(error: object) -> FileFormatError:
    hint = "ask an operator to remove it; the next `almanac publish` writes it again"
    return FileFormatError(f"damaged: {error!s:.200}", hint)


def _known(row: Row) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}


def _row(table: str, known: Mapping[str, Any]) -> Any:
    """A row with all columns of a table, None for those that are not known."""
    return {**dict.fromkeys(TABLES[table].schema.names), **known}


def _pack_series(context: JobContext) -> tuple[dict[str, Any] | None, bytes]:
    """The series' description and its samples: half floats, one counter after the other, a row for each GPU."""
    series = context.series
    if series is None:
        return None, b""
    shown = [name for name in _shown_counters(context, series) if series.has(name)]
    head = {"units": list(series.units), "bin_s": series.bin_s, "bins": series.bins, "counters": shown}
    with np.errstate(over="ignore"):  # values of a broken sensor become infinite, which counts as missing
        halves = [(series.values[name] / _UNITS.get(name, np.float32(1))).astype("<f2") for name in shown]
    return head, b"".join(half.tobytes() for half in halves)


def _shown_counters(context: JobContext, series: GpuSeries) -> Iterable[str]:
    """The counters that charts and the terminal show."""
    pipes = context.metrics.get("pipes_used") or ()
    util = "gpu_util_pct" if series.has("gpu_util_pct") else "gr_engine_active_frac"
    roofline = [f"{pipe}_active_frac" for pipe in pipes] + (["dram_active_frac"] if pipes else [])
    return dict.fromkeys((util, "hbm_used_mib", *(name for name in roofline if name in COUNTERS)))


def _series(head: Mapping[str, Any] | None, samples: bytes) -> GpuSeries | None:
    if head is None:
        return None
    units, counters = tuple(map(str, head["units"])), list(head["counters"])
    shape = (len(units), int(head["bins"]))
    if shape[1] < 1 or set(counters) - set(COUNTERS) or len(samples) != 2 * len(counters) * shape[0] * shape[1]:
        raise ValueError("samples are missing")
    found = np.frombuffer(samples, "<f2").astype(np.float32).reshape(len(counters), *shape)
    values: dict[str, Floats] = {name: np.full(shape, np.nan, np.float32) for name in COUNTERS}
    for name, grid in zip(counters, found, strict=True):
        values[name] = grid * _UNITS.get(name, np.float32(1))
    return GpuSeries(units, float(head["bin_s"]), values)


def _tier_row(tier: Tier) -> dict[str, Any]:
    """Older programs know no slices, and can still read whole GPUs."""
    values = asdict(tier)
    if not tier.is_slice:
        del values["compute_slices"]
    return values


def _advice_row(advice: Advice) -> dict[str, Any]:
    """An advice as plain values, without what no report shows and older programs do not know."""
    values = asdict(advice)
    for name in ("script_key", "gpu_options", "may_use_more", "rule"):
        del values["request"][name]
    for name in ("slow_down", "no_slice"):
        if not values["tier"][name]:
            del values["tier"][name]
    values["set_aside"] = values.pop("excluded")  # the name in files of this format
    values["priority"] = None if advice.priority is None else advice.priority.to_table()
    return values


def _advice(values: Mapping[str, Any]) -> Advice:
    evidence = _record(MemoryEvidence, values["evidence"])
    if evidence:
        evidence = dataclasses.replace(evidence, newest_peaks_mib=tuple(evidence.newest_peaks_mib))
    return Advice(
        request=Request(**values["request"]),
        tier=TierAdvice(**values["tier"]),
        bound=_record(MemoryBound, values["bound"]),
        duration=_record(Duration, values["duration"]),
        priority=None if values["priority"] is None else PriorityAdvice.from_table(values["priority"]),
        excluded=values["set_aside"],
        evidence=evidence,
        waits=tuple(_records(ExpectedWait, values["waits"])),
        services=values["services"],
    )


def _record(kind: type[_Record], values: Mapping[str, Any] | None) -> _Record | None:
    return None if values is None else kind(**values)


def _records(kind: type[_Record], rows: Sequence[Mapping[str, Any]]) -> Iterable[_Record]:
    return (kind(**values) for values in rows)
