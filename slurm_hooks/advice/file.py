"""The advice file: one per user, and `_site` for everybody else. `almanac publish` writes it, hooks read it. Data only.

    almanac-advice  1                              2 where a tier is a MIG slice; of another format: not used
    version         20261121T101500Z-3f2a9c0d1e2f  when the content last changed, and of what
    written         1795256100                     s since 1970
    expires         1795428900                     from then on the file is not used
    mode            observe                        off, observe or apply: what job_submit does with the site factor
    tell            no                             yes or no: job_submit tells the user the text
    prompt          ask                            off, show or ask: what the client side does on a terminal
    priority        1000  60  8640000              K, least and greatest GPU-time of advisor.decisions.priority
    tier            hbm40g  40960  constraint  hbm40g            any number of them; in format 2 one field more:
    tier            1g.10gb  9728  gres  1g.10gb  1              compute slices, 0 for a whole GPU
    F  key  gpus  predicted_s  site_factor  bound_mib  tier  waits  text  a family: name key and GPU count
                                                              why=REASON for waits where no text is shown
    G  -    gpus  predicted_s  site_factor  -  -  -  -                  any name with as many GPUs
    U  -    -     predicted_s  extra  -  -  -  -                        any job: extra + that of predicted_s x gpus
    end             3                              the number of rows F, G and U

Lines come in this order and end in a newline; one tab separates the fields. No field is empty ("-": none). Every
other byte is 0x20..0x7e. Readers ignore a file that breaks a rule. They look for F of the key and GPU count, then G of
the GPU count, then U, in the user's file; then for G and U in `_site`. Of equal rows the first counts.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from advisor.decisions.priority import site_factor
from almanac.errors import FileFormatError

if TYPE_CHECKING:
    from pathlib import Path
from almanac.submit_config import MAX_COMPUTE_SLICES, Priority, PriorityMode, PromptMode, Tier, TierKind

FORMAT, SLICE_FORMAT = "1", "2"
"""SLICE_FORMAT: of files with MIG slices. Readers of format 1 alone would offer slices to jobs of several nodes."""
FIRST_LINES = tuple(f"almanac-advice\t{version}\n".encode() for version in (FORMAT, SLICE_FORMAT))
LIFETIME_S = 48 * 3600
"""Time after which an advice file expires: two days of failed publishing, over which advice stays about right."""
MAX_BYTES = 65_536
CLOCK_TOLERANCE_S = 300
"""A file that was written later than this is not used. MUNGE, and so Slurm, works with clocks that differ by less."""
NONE = "-"
_WHY_NOT = "why="
RowKind = Literal["F", "G", "U"]
FAMILY: Final = "F"
GPUS: Final = "G"
USER: Final = "U"

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


@dataclass(frozen=True, slots=True)
class Row:
    """The prediction and the advice for a family (F), a GPU count (G), or any job (U) of one user.

    predicted_s: run time; of U the time that counts for the site factor. site_factor: of U only the points of options.
    bound_mib: upper bound of the peak GPU memory; tier: the one to ask for; None where unknown.
    waits: "hbm80g=3 h 10 min;hbm40g=12 min". text: the sentence for the user; with a tier, "TIER is enough: " goes
    before it. Both "" if there is none. why_not: why there is no text; "" if there is one, or if it is not known.
    """

    kind: RowKind
    predicted_s: int
    site_factor: int
    key: str = ""
    gpus: int | None = None
    bound_mib: int | None = None
    tier: str | None = None
    waits: str = ""
    text: str = ""
    why_not: str = ""


@dataclass(frozen=True)
class AdviceFile:
    """A file's content. priority: only K, least and greatest GPU-time are told."""

    version: str
    written_s: int
    expires_s: int
    mode: PriorityMode
    tell: bool
    prompt: PromptMode
    priority: Priority
    tiers: tuple[Tier, ...]
    rows: tuple[Row, ...]

    @property
    def format(self) -> str:
        """The oldest format that holds the content."""
        return SLICE_FORMAT if any(tier.is_slice for tier in self.tiers) else FORMAT

    @cached_property
    def _places(self) -> dict[tuple[RowKind, str, int | None], Row]:
        places: dict[tuple[RowKind, str, int | None], Row] = {}
        for row in self.rows:
            places.setdefault((row.kind, row.key, row.gpus), row)
        return places

    def find(self, key: str, gpus: int) -> Row | None:
        """The row of a submission, by this file alone."""
        ways = ((FAMILY, key, gpus), (GPUS, "", gpus), (USER, "", None))
        return next((self._places[way] for way in ways if way in self._places), None)

    def find_any(self, gpus: int) -> Row | None:
        """The same for a name that the file does not know."""
        return self._places.get((GPUS, "", gpus)) or self._places.get((USER, "", None))


@dataclass(frozen=True)
class AdviceMatch:
    """The row of a submission, the file that it is from, and the site factor of the whole submission."""

    row: Row
    file: AdviceFile
    site_factor: int


def look_up(user: AdviceFile | None, site: AdviceFile | None, key: str, gpus: int) -> AdviceMatch | None:
    """What the files say of a submission; None where they say nothing, and for one without GPUs."""
    if gpus <= 0:
        return None
    ways = ((user, user.find(key, gpus) if user else None), (site, site.find_any(gpus) if site else None))
    for file, row in ways:
        if file is not None and row is not None:
            return AdviceMatch(row, file, site_factor_of(row, gpus, file.priority))
    return None


def site_factor_of(row: Row, gpus: int, priority: Priority) -> int:
    """The site factor of a submission with this number of GPUs."""
    return row.site_factor if row.kind != USER else site_factor(row.predicted_s * gpus, priority) + row.site_factor


def render(file: AdviceFile) -> bytes:
    """The file's bytes. Raises ValueError, naming the line, where they would break the format."""
    priority = file.priority
    scale = map(_decimal, (priority.points_per_e, priority.min_gpu_time_s, priority.max_gpu_time_s))
    lines = [
        f"almanac-advice\t{file.format}",
        f"version\t{file.version}",
        f"written\t{file.written_s}",
        f"expires\t{file.expires_s}",
        f"mode\t{file.mode}",
        f"tell\t{'yes' if file.tell else 'no'}",
        f"prompt\t{file.prompt}",
        "\t".join(["priority", *scale]),
        *[render_tier(tier, file.format) for tier in file.tiers],
        *map(render_row, file.rows),
        f"end\t{len(file.rows)}",
    ]
    _parse_lines(lines)
    content = "\n".join([*lines, ""]).encode("ascii")
    if len(content) > MAX_BYTES:
        raise ValueError(f"{len(content)} bytes, at most {MAX_BYTES} are read")
    return content


def _decimal(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def render_tier(tier: Tier, file_format: str = FORMAT) -> str:
    line = f"tier\t{tier.name}\t{tier.capacity_mib}\t{tier.kind}\t{tier.constraint or tier.gres or tier.partition}"
    return f"{line}\t{tier.compute_slices}" if file_format == SLICE_FORMAT else line


def render_row(row: Row) -> str:
    waits = f"{_WHY_NOT}{row.why_not}" if row.why_not else row.waits
    fields = (row.key, row.gpus, row.predicted_s, row.site_factor, row.bound_mib, row.tier, waits, row.text)
    return "\t".join([row.kind, *(NONE if field in (None, "") else str(field) for field in fields)])


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
    if now_s is not None and is_of_future(file, now_s):
        raise FileFormatError("written in the future: a clock was ahead")
    return file


def is_of_future(file: AdviceFile, now_s: int) -> bool:
    """Whether a clock was ahead when the file was written: it would then be believed for as long."""
    return file.written_s > now_s + CLOCK_TOLERANCE_S


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


def _row(line: str) -> Row:
    match = _match(_ROW, line)
    key, own_gpus, gpus, predicted, factor, bound, tier, waits, text = match.groups()
    is_silent = text == NONE and waits.startswith(_WHY_NOT)
    row = Row(
        kind=cast(RowKind, line[0]),
        predicted_s=int(predicted),
        site_factor=int(factor),
        key=key or "",
        gpus=int(own_gpus or gpus or 0) or None,
        bound_mib=None if bound == NONE else int(bound),
        tier=None if tier == NONE else tier,
        waits="" if waits == NONE or is_silent else waits,
        text="" if text == NONE else text,
        why_not=waits.removeprefix(_WHY_NOT) if is_silent else "",
    )
    if row.kind != FAMILY and (row.bound_mib, row.tier, row.waits, row.text, row.why_not) != (None, None, "", "", ""):
        raise ValueError(f"only a family has more than a time and a site factor: {line[:60]!r}")
    return row


def read(path: Path | str, now_s: int | None) -> AdviceFile:
    """Raises FileFormatError where the file is not to be used, FileNotFoundError where it is not there.

    Never waits: a FIFO is refused. now_s: as of parse.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileFormatError("not a regular file")
        return parse(file.read(MAX_BYTES + 1), now_s)


def usable(path: Path | str, now_s: int) -> AdviceFile | None:
    """The file, or None where it is absent, unreadable, malformed or expired."""
    try:
        return read(path, now_s)
    except (FileFormatError, OSError):
        return None


def unwritable(tiers: Iterable[Tier]) -> list[str]:
    """Names and selectors that an advice file cannot hold: not plain ASCII, or with what parts its fields."""
    texts = [text for tier in tiers for text in (tier.name, tier.constraint, tier.gres, tier.partition) if text]
    return [text for text in texts if not re.fullmatch(r"[\x21-\x3a\x3c\x3e-\x7e]+", text) or text == NONE]
