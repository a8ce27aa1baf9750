"""Rows of an imported job trace as rows of the jobs table."""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from almanac.names import name_key
from almanac.records import Counts
from almanac.tres import parse_gpus, parse_shares, parse_tres
from almanac.units import parse_time_limit, printable
from slurm.sacct import note_shares, optional_number, read_state
from telemetry.sources.file_columns import Layout, Origin
from telemetry.store.schema import JOBS

_UNKNOWN = frozenset({"", "Unknown", "None", "N/A", "(null)", "NULL", "null", "nan", "NaN", "Partition_Limit"})
_UNLIMITED = frozenset({"UNLIMITED", "INFINITE"})
_HASHED_FROM = 2**62
"""Ids made of a text lie above every id that Slurm gives (32 bits)."""
_STEP = re.compile(r"[0-9]+(_[0-9]+)?\.(batch|extern|interactive|[0-9]+)")
_TIMES = ("submit_s", "start_s", "end_s")
_TRUE, _FALSE = ("true", "t", "yes", "y", "on", "1", "1.0"), ("false", "f", "no", "n", "off", "0", "0.0")
_BOOLS = dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False)
_SUSPENDED = "suspended_s"
"""A column of layouts that no table has: the time for which a job was suspended."""
_ZONE_STEP_S = 1800
"""The offsets of a zone differ by whole hours, on Lord Howe Island by half an hour."""
_BACK_S, _MOST_S = 3600, 7200
"""By how much a clock is set back in fall, and the most that any change of a clock explains."""
LOCAL = "with local times (export with TZ=UTC, import again)"
"""A note on rows during which the clock changed. All other times of such a file are off by the zone's offset, too."""
_TOO_LONG = "with more elapsed time than end - start"
_TOO_SHORT = "with much less elapsed time than end - start (suspended?)"


class _Bad:
    """A value that was not understood."""

    def __init__(self, text: str) -> None:
        self.text = printable(text, 80)


def read_jobs(block: pa.Table, layout: Layout, since_s: int, until_s: int, latest_s: int, counts: Counts) -> pa.Table:
    """The jobs of one block that were submitted in [since_s, until_s).

    A row without job id or submit time, or whose times contradict each other or lie after latest_s, is counted and
    dropped; any other value that is not understood is noted and left null.
    """
    names = (*JOBS.names, _SUSPENDED)
    columns = [*(_column(block, layout, name) for name in names), _have_zone(block, layout)]
    kept = []
    for *values, has_zone in zip(*columns, strict=True):
        row = dict(zip(names, values, strict=True))
        submit_s = row["submit_s"]
        if isinstance(submit_s, int) and submit_s <= latest_s and not since_s <= submit_s < until_s:
            continue
        counts.seen += 1
        try:
            kept.append(_job(row, layout, latest_s, has_zone, counts))
        except ValueError as error:
            reason, _, example = str(error).partition(": ")
            counts.drop(reason, 1, example)
    counts.kept += len(kept)
    return pa.Table.from_pylist(kept, schema=JOBS)


def _job(row: dict[str, Any], layout: Layout, latest_s: int, has_zone: bool, counts: Counts) -> dict[str, Any]:
    """One row, complete. Raises ValueError("reason: example") if it is no job."""
    for name in ("job_id", "submit_s"):
        if isinstance(row[name], _Bad):
            raise ValueError(
                f"{'job step' if _STEP.fullmatch(row[name].text) else f'{name} not understood'}: {row[name].text}"
            )
        if row[name] is None:
            raise ValueError(f"no {name}")
    for name, value in row.items():
        if isinstance(value, _Bad):
            counts.note(f"{name} not understood", 1, value.text)
            row[name] = None
    _compare_times(row, has_zone, counts)
    if not has_zone:
        _undo_early_start(row, counts)
    note_shares(row, counts)
    _complete(row, layout)
    times = [row[name] for name in _TIMES if row[name] is not None]
    if times != sorted(times):
        zone = "" if has_zone else " (they name no zone; export with TZ=UTC)"
        raise ValueError(f"times contradict each other{zone}: job {row['job_id']}")
    if times[-1] > latest_s:
        raise ValueError(f"time in the future: job {row['job_id']}")
    return row


def _compare_times(row: dict[str, Any], has_zone: bool, counts: Counts) -> None:
    """Note a row whose elapsed time contradicts its times; if the clock changed while it ran, its end is corrected.

    Elapsed time is without suspensions.
    """
    start_s, end_s, elapsed_s, suspended_s = (row[name] for name in ("start_s", "end_s", "elapsed_s", _SUSPENDED))
    if None in (start_s, end_s, elapsed_s):
        return
    more_s = elapsed_s + (suspended_s or 0) - (end_s - start_s)
    if elapsed_s and 0 < abs(more_s) <= _MOST_S and more_s % _ZONE_STEP_S == 0 and not has_zone:
        counts.note(LOCAL, 1, f"job {row['job_id']}")
        row["end_s"] += more_s
    elif more_s > 1 or more_s < -_MOST_S:
        counts.note(_TOO_LONG if more_s > 0 else _TOO_SHORT, 1, f"job {row['job_id']}")


def _undo_early_start(row: dict[str, Any], counts: Counts) -> None:
    """Move the times of a job that started up to an hour before its submission: the clock was set back in between."""
    names = [name for name in ("start_s", "end_s") if row[name] is not None]
    if names and 0 < row["submit_s"] - row[names[0]] <= _BACK_S:
        counts.note(LOCAL, 1, f"job {row['job_id']}")
        row.update({name: row[name] + _BACK_S for name in names})


def _have_zone(block: pa.Table, layout: Layout) -> list[bool]:
    """For each row: False if its start or end is a date without a time zone."""
    names = [name for ours in ("start_s", "end_s") for name in layout.columns.get(ours, Origin()).columns]
    columns = [block[name].to_pylist() for name in names if name in block.column_names]
    return [not any(map(_is_zoneless, values)) for values in zip(*columns, strict=True)] or [True] * len(block)


def _complete(row: dict[str, Any], layout: Layout) -> None:
    """Fill what follows from the rest: end, elapsed time and name key. A job is eligible before it starts."""
    if "end_s" not in layout.columns and None not in (row["start_s"], row["elapsed_s"]):
        row["end_s"] = row["start_s"] + row["elapsed_s"]
    if row["elapsed_s"] is None and None not in (row["start_s"], row["end_s"]):
        row["elapsed_s"] = max(0, row["end_s"] - row["start_s"])
    if row["eligible_s"] is not None:
        latest_s = row["eligible_s"] if row["start_s"] is None else row["start_s"]
        row["eligible_s"] = max(row["submit_s"], min(row["eligible_s"], latest_s))
    if row["name"] is not None:
        row["name_key"] = name_key(row["name"])


def _column(block: pa.Table, layout: Layout, ours: str) -> list[Any]:
    """The values of one of our columns; None if missing, _Bad if not understood."""
    origin = layout.columns.get(ours, Origin())
    values: list[Any] = [origin.value] * len(block)
    read = _reader(ours, origin, layout)
    is_exact = layout.is_typed and ours in JOBS.names and JOBS.field(ours).type == pa.string() and ours != "state"
    unknown = frozenset() if is_exact else _UNKNOWN | origin.missing
    for column in reversed([name for name in origin.columns if name in block.column_names]):
        own = [_read(text, read, unknown) for text in block[column].to_pylist()]
        # A 0 gives way to what another column says: AllocTRES names no GPU where Slurm does not account for GPUs.
        values = [new if new or old is None else old for new, old in zip(own, values, strict=True)]
    return values


def _read(text: str | None, read: Callable[[str], Any], unknown: frozenset[str]) -> Any:
    stripped = (text or "").strip()
    if text is None or stripped in unknown:
        return None
    try:
        return read(text)
    except (ValueError, OverflowError):
        return _Bad(stripped)


def _reader(ours: str, origin: Origin, layout: Layout) -> Callable[[str], Any]:
    """The function that turns a text of the file into a value of our column."""
    if ours == "state":
        return lambda value: _state(value, layout.states)
    if origin.parse:
        return _READERS[origin.parse]
    if ours == "job_id" or ours in (*_TIMES, "eligible_s"):
        return _job_id if ours == "job_id" else _time
    kind = JOBS.field(ours).type if ours in JOBS.names else pa.int64()
    if kind == pa.string():
        return str
    if kind == pa.bool_():
        return _boolean
    scale = origin.scale
    return (lambda value: _integer(value, scale)) if kind == pa.int64() else (lambda value: _number(value) * scale)


def _integer(text: str, scale: float = 1.0) -> int:
    """A whole number of 0 or more. Raises ValueError."""
    exact = scale == 1 and re.fullmatch(r"[0-9]{1,19}", text.strip())
    number = int(text) if exact else _number(text) * scale
    if number != int(number) or number >= 2**63:
        raise ValueError(f"no whole number: {text!r}")
    return int(number)


def _number(text: str) -> float:
    """A finite number of 0 or more. Raises ValueError."""
    number = float(text)
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"no number: {text!r}")
    return number


def _time(text: str) -> int:
    """Seconds since 1970 of a number, or of ISO 8601 (UTC unless it names a zone). Raises ValueError."""
    if re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*", text):
        return math.floor(_number(text))
    time = dt.datetime.fromisoformat(text.strip())
    return math.floor(_number(str((time if time.tzinfo else time.replace(tzinfo=dt.UTC)).timestamp())))


def _is_zoneless(text: str | None) -> bool:
    """Return True for a date that _time can read only because it takes the zone to be UTC."""
    with contextlib.suppress(ValueError):
        stripped = (text or "").strip()
        return not stripped.isdecimal() and dt.datetime.fromisoformat(stripped).tzinfo is None
    return False


def _boolean(text: str) -> bool:
    """A truth value, in any case. Raises ValueError."""
    known = _BOOLS.get(text.strip().lower())
    if known is None:
        raise ValueError(f"no truth value: {text!r}")
    return known


def _job_id(text: str) -> int:
    """A job's number; of any other text a number that is always the same, above all that Slurm gives.

    Raises ValueError for a job step: it is no job.
    """
    text = text.strip()
    if re.fullmatch(r"[0-9]{1,18}", text):
        return int(text)
    if _STEP.fullmatch(text) or text.startswith("-"):
        raise ValueError(f"no job id: {text!r}")
    return _HASHED_FROM + int.from_bytes(
        hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=7).digest(), "big"
    )


def _state(text: str, states: Mapping[str, str]) -> str:
    """Slurm's long name of a state, by the file's own names or as read_state. Raises ValueError."""
    text = text.strip()
    if states:
        return states[text] if text in states else _state(states["*"], {}) if "*" in states else _state(text, {})
    state = read_state(text)
    if state is None:
        raise ValueError(f"no state: {text!r}")
    return state


def _minutes(text: str) -> int | None:
    """Seconds of minutes; None if there is no limit. Raises ValueError."""
    return None if text.strip().upper() in _UNLIMITED else _integer(text) * 60


def _duration(text: str) -> int | None:
    """Seconds of a number of seconds, or of D-HH:MM:SS; None if it is unlimited. Raises ValueError."""
    text = text.strip()
    return parse_time_limit(text) if ":" in text or text.upper() in _UNLIMITED else _integer(text)


def _array(text: str, part: int) -> int | None:
    """Of "123_4" the 123 or the 4; None for a job that is no task of an array."""
    match = re.fullmatch(r"([0-9]{1,18})_([0-9]{1,18})", text.strip())
    return int(match[part]) if match else None


def _exit(text: str, part: int) -> int:
    """Of Slurm's "0:9" the code 0 or the signal 9. Raises ValueError."""
    match = re.fullmatch(r"([0-9]{1,5})(?::([0-9]{1,5}))?", text.strip())
    if not match:
        raise ValueError(f"no exit code: {text!r}")
    return int(match[part] or 0)


_READERS: dict[str, Callable[[str], Any]] = {
    "minutes": _minutes,
    "duration": _duration,
    "array_job": lambda value: _array(value, 1),
    "array_task": lambda value: _array(value, 2),
    "tres_gpus": lambda value: parse_gpus(value).count,
    "tres_shares": parse_shares,
    "tres_nodes": lambda value: optional_number(parse_tres(value).get("node", "")),
    "tres_gpu_type": lambda value: parse_gpus(value).type or None,
    "exit_code": lambda value: _exit(value, 1),
    "exit_signal": lambda value: _exit(value, 2),
    # Torque: 0 to 255 is the exit code, from 256 on 256 + signal, below 0 a reason of its own.
    "pbs_code": lambda value: int(value) if 0 <= int(value) < 256 else None,
    "pbs_signal": lambda value: int(value) - 256 if int(value) > 256 else None,
}
