"""Slurm's ways of writing times and sizes, and ours of showing them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

DAY_S, HOUR_S = 86_400, 3600
MOST_USER_TEXT = 65_536
"""Characters of a script, comment, or line of a user that are parsed; a longer one allows and asks for nothing."""


def parse_time_limit(text: str) -> int | None:
    """Seconds of a Slurm time: "90" (minutes), "MM:SS", "HH:MM:SS", "D-HH[:MM[:SS]]". None: no limit.

    Raises ValueError, naming the text, for any other text.
    """
    text = text.strip()
    if text.upper() in ("UNLIMITED", "INFINITE", "-1"):
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise ValueError(f"not a Slurm time: {text!r} (expected minutes, MM:SS, HH:MM:SS or D-HH:MM:SS)")
    days, *rest = match.groups()
    fields = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*fields, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    if len(fields) == 3:
        return fields[0] * 3600 + fields[1] * 60 + fields[2]
    return fields[0] * 60 + (fields[1] if len(fields) == 2 else 0)


def format_duration(seconds: float) -> str:
    """As a person says it, at most two units: "12 s", "12 min", "3 h 10 min", "2 d 4 h"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{round(whole / 60)} min"
    minutes = round(whole / 60)
    if minutes < 24 * 60:
        hours, rest = divmod(minutes, 60)
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    days, rest = divmod(round(whole / 3600), 24)
    return f"{days} d {rest} h" if rest else f"{days} d"


def format_moment(time_s: int) -> str:
    """A time for people, UTC: "2026-11-21 10:15 UTC"."""
    return f"{dt.datetime.fromtimestamp(time_s, dt.UTC):%Y-%m-%d %H:%M} UTC"


def format_gib(mib: float) -> str:
    """MiB as GiB with one decimal: "21.3 GiB". Less than 0.1 GiB is in MiB: "13 MiB"."""
    return f"{max(mib, 1):.0f} MiB" if 0 < mib < 102.4 else f"{mib / 1024:.1f} GiB"


def span_text(low: str, high: str) -> str:
    """A range of two texts, "40 s to 2 min"; one of them if they are equal."""
    return low if low == high else f"{low} to {high}"


def format_short_duration(seconds: float) -> str:
    """As format_duration, for narrow tables: "12s", "12m", "3h 10m", "2d 4h"."""
    parts = format_duration(seconds).split()
    return " ".join(number + unit[0] for number, unit in zip(parts[::2], parts[1::2], strict=True))


def format_number(number: float, digits: int = 4) -> str:
    """So many significant digits, never with an exponent; larger numbers as whole ones: "0.04167", "404,612"."""
    if 0 < abs(number) < 1e-6:
        return "<0.000001" if number > 0 else ">-0.000001"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(number)))) if number else 0
    text = f"{number or 0:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_count(number: int) -> str:
    """12345 as "12,345"."""
    return f"{number:,}"


def number_text(number: float | None, form: str) -> str:
    """The number in this format; "-" for None and NaN."""
    return "-" if number is None or math.isnan(number) else format(number, form)


def json_value(value: Any) -> Any:
    """The value for JSON, which has no NaN: null stands for it. A dataclass becomes an object."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, Mapping):
        return {key: json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def printable(text: str, limit: int = 200) -> str:
    """Hostile text made safe for a terminal: control, bidi and invisible characters become "?"."""
    safe = "".join(char if char.isprintable() else "?" for char in text)
    return safe if len(safe) <= limit else safe[: limit - 1] + "…"


def did_you_mean(text: str, valid: Iterable[str]) -> str:
    """A question such as "did you mean jobs? " that names up to three similar words; "" without any."""
    import difflib  # takes 4 ms to import, and only errors need it

    words = {word.lower(): word for word in valid}
    near = difflib.get_close_matches(text[:80].lower(), words, n=3)
    return f"did you mean {', '.join(printable(words[word], 80) for word in near)}? " if near else ""


def counted(number: int, noun: str) -> str:
    """For example "1 node" or "1,800 nodes"."""
    return f"{format_count(number)} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], noun: str, shown: int = 4) -> str:
    """Return the number, and the first few: "5 hosts (a1, a2, a3, a4, ...)"."""
    first = ", ".join(printable(name, 80) for name in names[:shown])
    return f"{counted(len(names), noun)} ({first}{', ...' if len(names) > shown else ''})"


def valid_unicode(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate, as JSON's "\\ud800" gives, becomes "?"."""
    return text.encode("utf-8", "replace").decode("utf-8")


def cell_text(value: object, *, is_for_spreadsheets: bool) -> str:
    """A value as a cell of separated text: None is empty, a list joined by ";", control characters become "?".

    is_for_spreadsheets: text that would be taken for a formula gets a leading quote (OWASP, CSV injection); numbers
    are left as they are.
    """
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return cell_text(";".join(map(str, value)), is_for_spreadsheets=is_for_spreadsheets)
    text = printable(str(value), 100_000)
    is_formula = is_for_spreadsheets and isinstance(value, str) and text.lstrip().startswith(_FORMULA_STARTS)
    return f"'{text}" if is_formula else text


# The full-width forms too: spreadsheets take them for the plain ones.
_FORMULA_STARTS = ("=", "+", "-", "@", "＝", "＋", "－", "＠")
_UNIT_S = {"second": 1, "minute": 60, "hour": 3600, "day": 86400, "week": 604800}
_RELATIVE = re.compile(r"now(?:([+-]\d+)(second|minute|hour|day|week)s?)?", re.IGNORECASE)


def parse_moment(text: str, now_s: int) -> int:
    """Seconds since 1970 of a time as sacct takes it, in the local time zone.

    "YYYY-MM-DD[THH:MM[:SS]]", "now", "now-7days", "today", "midnight", or "@SECONDS". Raises ValueError, also for a
    time that is no date.
    """
    text = text.strip()
    try:
        moment_s = _moment(text, now_s)
        dt.datetime.fromtimestamp(moment_s, dt.UTC)
    except (ValueError, OverflowError, OSError) as error:
        said = f"not a time: {printable(repr(text), 80)} (expected YYYY-MM-DD[THH:MM[:SS]] or now-7days)"
        raise ValueError(said) from error
    return moment_s


def _moment(text: str, now_s: int) -> int:
    relative = _RELATIVE.fullmatch(text)
    if relative:
        return now_s + int(relative[1] or 0) * _UNIT_S[(relative[2] or "second").lower()]
    if re.fullmatch(r"@\d{1,12}", text):
        return int(text[1:])
    if text.lower() in ("today", "midnight"):
        return int(dt.datetime.fromtimestamp(now_s).replace(hour=0, minute=0, second=0).timestamp())
    return int(dt.datetime.fromisoformat(text).timestamp())


def format_job_id(row: Mapping[str, object]) -> str:
    """The id as Slurm shows it: an array task is 1234_5, a component of a heterogeneous job 1234+1.

    row: of the table jobs, with job_id, array_job_id, array_task_id, het_job_id, and het_offset.
    """
    for whole, mark, part in (("array_job_id", "_", "array_task_id"), ("het_job_id", "+", "het_offset")):
        if row.get(whole) is not None and row.get(part) is not None:
            return f"{row[whole]}{mark}{row[part]}"
    return str(row["job_id"])


def size_class(gpus: int) -> int:
    """Return the next power of two: 1, 2, 4, 8 ..."""
    return 1 << max(gpus - 1, 0).bit_length()
