"""A second reader of advice in lines (slurm_hooks/advice/sched.py): almanac.lua must take and refuse the same."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from almanac.errors import FileFormatError
from almanac.published.files import CLOCK_TOLERANCE_S
from almanac.submit_config import MAX_COMPUTE_SLICES, Priority, PriorityMode, PromptMode, Tier, TierKind
from slurm_hooks.advice.file import ADVICE, FAMILY, AdviceFile, AdviceRow, RowKind
from slurm_hooks.advice.sched import FORMAT, MAX_BYTES, NONE, SLICE_FORMAT

_WHY_NOT = "why="
_INT, _COUNT, _DECIMAL, _TEXT = r"[0-9]{1,12}", r"[1-9][0-9]{0,5}", r"[0-9]{1,12}(?:\.[0-9]{1,6})?", r"[\x20-\x7e]+"
_SITE_FACTOR, _KEY = r"[0-9]{1,9}", r"[\x21-\x7e]{1,64}"
_HEADERS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"almanac-advice\t({FORMAT}|{SLICE_FORMAT})",
        r"version\t([0-9A-Za-z.-]{1,64})",
        rf"written\t({_INT})",
        rf"expires\t({_INT})",
        rf"mode\t({'|'.join(get_args(PriorityMode))})",
        r"tell\t(yes|no)",
        rf"prompt\t({'|'.join(get_args(PromptMode))})",
        rf"priority\t({_DECIMAL})\t({_DECIMAL})\t({_DECIMAL})",
    )
)
_TIER = re.compile(rf"tier\t({_TEXT})\t({_INT})\t({'|'.join(get_args(TierKind))})\t({_TEXT})")
_TIERS = {FORMAT: _TIER, SLICE_FORMAT: re.compile(rf"{_TIER.pattern}\t([0-{MAX_COMPUTE_SLICES}])")}
_ROW = re.compile(
    rf"(?:F\t({_KEY})\t({_COUNT})|G\t-\t({_COUNT})|U\t-\t-)\t({_INT})\t({_SITE_FACTOR})"
    rf"\t({_INT}|-)\t({_TEXT})\t({_TEXT})\t({_TEXT})"
)
_END = re.compile(rf"end\t({_INT})")


def parse(content: bytes, now_s: int | None) -> AdviceFile:
    """Raises FileFormatError where the file is not to be used. now_s: None for a look at an expired one too."""
    if len(content) > MAX_BYTES:
        raise FileFormatError(f"larger than {MAX_BYTES} bytes")
    text = content.decode("latin-1")
    if not text.endswith("\n"):
        raise FileFormatError("cut off: the last line has no end")
    try:
        file = _parse_lines(text[:-1].split("\n"))
    except ValueError as error:
        raise FileFormatError(str(error)) from error
    if now_s is not None and file.expires_s <= now_s:
        raise FileFormatError("expired")
    if now_s is not None and file.written_s > now_s + CLOCK_TOLERANCE_S:
        raise FileFormatError("written in the future: a clock was ahead")
    return file


def _parse_lines(lines: Sequence[str]) -> AdviceFile:
    """Raises ValueError."""
    if len(lines) < len(_HEADERS) + 1:
        raise ValueError("cut off: lines are missing")
    found = [_match(pattern, line) for pattern, line in zip(_HEADERS, lines, strict=False)]
    first, version, written, expires, mode, tell, prompt, scale = found
    rest, end = lines[len(_HEADERS) : -1], _match(_END, lines[-1])
    tiers = [_tier(line, first[1]) for line in rest if line.startswith("tier\t")]
    rows = [_row(line) for line in rest[len(tiers) :]]
    if int(end[1]) != len(rows):
        raise ValueError(f"{len(rows)} rows, {end[1]} were written")
    if "".join(row.kind for row in rows) != "".join(sorted(row.kind for row in rows)):
        raise ValueError("rows are out of order")
    return AdviceFile(
        version=version[1],
        written_s=int(written[1]),
        expires_s=int(expires[1]),
        mode=cast(PriorityMode, mode[1]),
        tell=tell[1] == "yes",
        prompt=cast(PromptMode, prompt[1]),
        priority=_scale(*map(float, scale.groups())),
        tiers=tuple(tiers),
        rows=tuple(rows),
    )


def _match(pattern: re.Pattern[str], line: str) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise ValueError(f"not a line of format {FORMAT} or {SLICE_FORMAT}: {line[:60]!r}")
    return match


def _scale(points_per_e: float, min_gpu_time_s: float, max_gpu_time_s: float) -> Priority:
    if not 0 < min_gpu_time_s < max_gpu_time_s or not points_per_e:
        raise ValueError("the priority line names no scale")
    return Priority(points_per_e=points_per_e, min_gpu_time_s=min_gpu_time_s, max_gpu_time_s=max_gpu_time_s)


def _tier(line: str, file_format: str) -> Tier:
    name, capacity, kind, selector, *compute = _match(_TIERS[file_format], line).groups()
    chosen = {"constraint": "", "gres": "", "partition": "", kind: selector}
    return Tier(name=name, capacity_mib=int(capacity), compute_slices=int(compute[0]) if compute else 0, **chosen)


def _row(line: str) -> AdviceRow:
    match = _match(_ROW, line)
    key, own_gpus, gpus, predicted, factor, bound, tier, why_not, text = match.groups()
    is_silent = text == NONE and why_not.startswith(_WHY_NOT)
    row = AdviceRow(
        kind=cast(RowKind, line[0]),
        predicted_s=int(predicted),
        site_factor=int(factor),
        key=key or "",
        gpus=int(own_gpus or gpus or 0) or None,
        bound_mib=None if bound == NONE else int(bound),
        tier=None if tier == NONE else tier,
        gains="" if why_not == NONE or is_silent else why_not,  # nothing else is written there now
        text="" if text == NONE else text,
        why_not=why_not.removeprefix(_WHY_NOT) if is_silent else "",
    )
    if row.kind != FAMILY and {bound, tier, why_not, text} != {NONE}:
        raise ValueError(f"only a family has more than a time and a site factor: {line[:60]!r}")
    return row


def usable(path: Path, now_s: int) -> AdviceFile | None:
    try:
        return parse(path.read_bytes(), now_s)
    except FileFormatError:
        return None


def shown(lines: str, gains: str = "") -> bytes:
    """Return the same advice as users' programs read it. gains: of each row."""
    file = parse(lines.encode(), None)
    return ADVICE.render(replace(file, rows=tuple(replace(row, gains=gains) for row in file.rows)))
