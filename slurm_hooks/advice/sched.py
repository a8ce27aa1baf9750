"""The advice in lines, which Lua reads inside slurmctld: <advice_dir>/sched/<uid>, of root and SlurmUser's group, 0640.

    almanac-advice  1                              2 if a tier is a MIG slice;    of another format: not used
    version         20261121T101500Z-3f2a9c0d1e2f  when the content last changed, and of what
    written         1795256100                     s since 1970
    expires         1795428900                     from then on the file is not used
    mode            observe                        off, observe or apply: what job_submit does with the site factor
    tell            no                             yes or no: job_submit tells the user the text
    prompt          ask                            off, show or ask: what the client side does on a terminal
    priority        1000  60  8640000              K, least and greatest GPU-time of the site factor
    tier            hbm40g  40960  constraint  hbm40g            any number of them; in format 2 one field more:
    tier            1g.10gb  9728  gres  1g.10gb  1              compute slices, 0 for a whole GPU
    F  key  gpus  predicted_s  site_factor  bound_mib  tier  why    text  a family: name key and GPU count
                                                              why=REASON if no text is shown
    G  -    gpus  predicted_s  site_factor  -  -  -  -                  any name with as many GPUs
    U  -    -     predicted_s  extra  -  -  -  -                        any job: extra + that of predicted_s x gpus
    end             3                              the number of rows F, G and U

Lines come in this order and end in a newline; one tab separates the fields. No field is empty ("-": none). Every
other byte is 0x20..0x7e. almanac.lua ignores a file that breaks a rule. `almanac publish` leaves the lines as `advice`
in the user's folder, and almanac-distribute copies them to sched/. Programs of the release before read the user's copy.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast, get_args

from almanac.errors import FileFormatError
from almanac.published.files import TEXT_BYTES
from almanac.submit_config import MAX_COMPUTE_SLICES, PriorityMode, PromptMode, Tier, TierKind
from slurm_hooks.advice.file import AdviceFile, AdviceRow

LINES = "advice"
"""Name of the file in a user's folder."""
MAX_BYTES = TEXT_BYTES
FORMAT, SLICE_FORMAT = "1", "2"
"""SLICE_FORMAT: of files with MIG slices. Readers of format 1 alone would offer slices to jobs of several nodes."""
FIRST_LINES = tuple(f"almanac-advice\t{version}\n".encode() for version in (FORMAT, SLICE_FORMAT))
NONE = "-"
_INT, _COUNT, _DECIMAL, _TEXT = r"[0-9]{1,12}", r"[1-9][0-9]{0,5}", r"[0-9]{1,12}(?:\.[0-9]{1,6})?", r"[\x20-\x7e]+"
_HEAD = re.compile(
    rf"almanac-advice\t[{FORMAT}{SLICE_FORMAT}]\nversion\t[0-9A-Za-z.-]{{1,64}}\nwritten\t({_INT})\nexpires\t({_INT})\n"
    rf"mode\t({'|'.join(get_args(PriorityMode))})\ntell\t(?:yes|no)\nprompt\t(?:{'|'.join(get_args(PromptMode))})\n"
    rf"priority\t{_DECIMAL}\t{_DECIMAL}\t{_DECIMAL}\n"
)
_TIER = re.compile(
    rf"tier\t{_TEXT}\t{_INT}\t(?:{'|'.join(get_args(TierKind))})\t{_TEXT}(?:\t[0-{MAX_COMPUTE_SLICES}])?"
)
_ROW = re.compile(
    rf"(?:F\t[\x21-\x7e]{{1,64}}\t{_COUNT}\t{_INT}\t[0-9]{{1,9}}\t(?:{_INT}|-)\t{_TEXT}\t{_TEXT}\t{_TEXT}"
    rf"|(?:G\t-\t{_COUNT}|U\t-\t-)\t{_INT}\t[0-9]{{1,9}}\t-\t-\t-\t-)"
)
_END = re.compile(r"\nend\t([0-9]{1,12})\n\Z")


@dataclass(frozen=True)
class SchedHead:
    """The head of a file in lines: when it was written and expires, unix seconds, and the mode of priorities."""

    written_s: int
    expires_s: int
    mode: PriorityMode


def head_of(content: bytes) -> SchedHead:
    """Return the head of a file. Raises FileFormatError if it is cut off or malformed: almanac.lua does not use it."""
    text = content.decode("latin-1")
    head, end = _HEAD.match(text), _END.search(text)
    if len(content) > MAX_BYTES:
        raise FileFormatError(f"larger than {MAX_BYTES} bytes")
    if head is None or end is None:
        raise FileFormatError("cut off, or not of this format")
    lines = text[head.end() - 1 : end.start()].split("\n")[1:]
    rows = [line for line in lines if not _TIER.fullmatch(line)]
    if len(rows) != int(end[1]) or not all(map(_ROW.fullmatch, rows)):
        raise FileFormatError(f"{end[1]} rows were written, and not all can be read")
    return SchedHead(int(head[1]), int(head[2]), cast(PriorityMode, head[3]))


def render(file: AdviceFile) -> bytes:
    """Return the file's bytes. Raises ValueError, naming the line, if they would break the format."""
    file_format = SLICE_FORMAT if any(tier.is_slice for tier in file.tiers) else FORMAT
    priority = file.priority
    scale = map(_decimal, (priority.points_per_e, priority.min_gpu_time_s, priority.max_gpu_time_s))
    head = [
        f"almanac-advice\t{file_format}",
        f"version\t{file.version}",
        f"written\t{file.written_s}",
        f"expires\t{file.expires_s}",
        f"mode\t{file.mode}",
        f"tell\t{'yes' if file.tell else 'no'}",
        f"prompt\t{file.prompt}",
        "\t".join(["priority", *scale]),
    ]
    tiers = [_tier_line(tier, file_format) for tier in file.tiers]
    rows = [row_line(row) for row in sorted(file.rows, key=lambda row: row.kind)]
    for pattern, lines in ((_HEAD, ["\n".join([*head, ""])]), (_TIER, tiers), (_ROW, rows)):
        for line in lines:
            if not pattern.fullmatch(line):
                raise ValueError(f"not a line of format {FORMAT} or {SLICE_FORMAT}: {line[:60]!r}")
    content = "\n".join([*head, *tiers, *rows, f"end\t{len(rows)}", ""]).encode("ascii")
    if len(content) > MAX_BYTES:
        raise ValueError(f"{len(content)} bytes, at most {MAX_BYTES} are read")
    return content


def _decimal(value: float) -> str:
    return f"{value:.6f}".rstrip("0").rstrip(".")


def _tier_line(tier: Tier, file_format: str) -> str:
    line = f"tier\t{tier.name}\t{tier.capacity_mib}\t{tier.kind}\t{tier.constraint or tier.gres or tier.partition}"
    return f"{line}\t{tier.compute_slices}" if file_format == SLICE_FORMAT else line


def row_line(row: AdviceRow) -> str:
    why_not, text = f"why={row.why_not}" if row.why_not else "", row.text
    if text and row.earlier:
        gains = ", ".join(f"about {earlier} earlier than with {tier}" for tier, earlier in row.earlier.items())
        text += f" It starts {gains} (half of such jobs did)."
    fields = (row.key, row.gpus, row.predicted_s, row.site_factor, row.bound_mib, row.tier, why_not, text)
    return "\t".join([row.kind, *(NONE if field in (None, "") else str(field) for field in fields)])
