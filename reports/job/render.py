"""Show a job's report: as a mail, an HTML page, JSON, text for a terminal, and in the format of jobstats."""

from __future__ import annotations

import base64
import gzip
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from almanac import __version__
from almanac.published.files import to_plain
from almanac.units import format_duration, format_gib, format_moment, printable
from reports.job.job_report import FigureRow, GpuRow, GpuSeries, JobReport

if TYPE_CHECKING:
    import css_inline
    import jinja2
    from markupsafe import Markup

Cells: TypeAlias = Sequence[float | None]
MAX_SUBJECT, MAX_TEXT = 150, 4000


@dataclass(frozen=True)
class Rendered:
    """A mail. subject: one line. text, html: the same content twice. images: PNGs by the content id that html names."""

    subject: str
    text: str
    html: str
    images: Mapping[str, bytes]


def render_email(report: JobReport) -> Rendered:
    """The mail to the job's owner. It loads nothing from outside the mail."""
    plots = _plots(report)
    images = {f"{name}.{report.job_id}@almanac": picture for name, picture in plots.items()}
    sources = {name: f"cid:{name}.{report.job_id}@almanac" for name in plots}
    text = templates().get_template("job.txt.j2").render(**_given(report))
    return Rendered(subject_of(report), text, _html(report, sources, is_mail=True), images)


def _plots(report: JobReport) -> Mapping[str, bytes]:
    """The charts of the report's findings, by name, in their order."""
    # On a terminal and in JSON there are no plots, and matplotlib takes 0.5 s to import.
    from reports.job.plots import render_plots

    found = render_plots(report)
    return {each.picture: found[each.picture] for each in report.findings if each.picture in found}


def render_page(report: JobReport) -> str:
    """The report as one HTML file, with its charts inside."""
    plots = _plots(report)
    sources = {name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in plots.items()}
    return _html(report, sources)


def subject_of(report: JobReport) -> str:
    """The mail's subject, one line: "train-bert-100: 40 GB GPUs are enough (peak 26 of 80 GiB) [job 1234]"."""
    job = f" [job {report.shown_id}]"
    return printable(report.title, MAX_SUBJECT - len(job)) + job


def _html(report: JobReport, sources: Mapping[str, str], *, is_mail: bool = False) -> str:
    return render_html("job.html.j2", **_given(report), sources=sources, is_mail=is_mail)


def render_html(template: str, **given: Any) -> str:
    """A page from a template of reports/templates, with its styles inline."""
    page = templates().get_template(template).render(**given)
    # ASCII reads the same in every encoding, wherever the inliner puts the line that names one.
    return _inliner().inline(page).encode("ascii", "xmlcharrefreplace").decode()


def _given(report: JobReport) -> dict[str, Any]:
    return {
        "subject": subject_of(report),
        "report": report,
        "kicker": _kicker(report),
        "has_pictures_missing": report.series is None and report.elapsed_s is not None and bool(report.gpu_count),
        "cluster": printable(report.cluster, 60),
        "links": report.links,
        "help_url": report.help_url,
        "job_urls": {},
        "version": __version__,
    }


def _kicker(report: JobReport) -> str:
    """Identify the job: "Job 1234 · train · COMPLETED · Partition gpu · Nodes n1 · ended 2026-11-17 17:00 UTC"."""
    parts = [f"{'' if row.name in ('Name', 'State') else f'{row.name} '}{_cell(row)}" for row in report.heading]
    end_s = report.job["end_s"]
    return " · ".join([*parts, *([] if end_s is None else [f"ended {format_moment(end_s)}"])])


def _cell(row: FigureRow) -> str:
    return f"{row.value} ({row.about})" if row.about else row.value


@cache
def templates() -> jinja2.Environment:
    import jinja2  # not in the client package

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("reports"),
        autoescape=jinja2.select_autoescape(enabled_extensions=("html.j2",), default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["folded"] = _folded
    environment.filters["hung"] = _hung
    environment.filters["with_whole_options"] = _with_whole_options
    return environment


def _folded(text: str, indent: int = 0, width: int = 78) -> str:
    """Text wrapped for a place that already has `indent` columns on its first line; later lines are indented."""
    return _hung(" " * indent + text, indent, width).lstrip()


def _hung(text: str, indent: int, width: int = 78) -> str:
    """Text wrapped at `width` columns, with every line after the first indented."""
    # An option such as --gpu-memory-utilization or -C "gpu&hbm40g" stays in one piece.
    kept = _OPTION_BLANK.sub(_KEPT_BLANK, text)
    filled = textwrap.fill(
        kept, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=_KEPT_BLANK not in kept
    )
    return filled.replace(_KEPT_BLANK, " ")


_OPTION_BLANK = re.compile(r"(?<=\s-[A-Za-z]) (?=\S)")
"""The blank between a short option and its value."""
_KEPT_BLANK = "\xa0"
"""A blank that no line breaks at. Texts never hold it: printable() replaces it."""


def _with_whole_options(text: str) -> Markup:
    """The text as HTML in which a short option such as --time=02:00:00 is not broken at its hyphens."""
    from markupsafe import Markup, escape

    # re.sub would escape the tags too if it were given Markup.
    option = r"--[a-z][\w=:.,/-]{0,30}|(?<=\s)-[A-Za-z] &#34;[\w&;.,:+|=-]{1,60}?&#34;"
    return Markup(re.sub(option, r'<span class="option">\g<0></span>', str(escape(text))))


@cache
def _inliner() -> css_inline.CSSInliner:
    """An inliner that leaves @media rules in the head, where mail clients with a dark mode read them."""
    import css_inline

    return css_inline.CSSInliner(load_remote_stylesheets=False, keep_at_rules=True, keep_style_tags=False)


def json_of(report: JobReport) -> dict[str, Any]:
    """The report for `--json`: as it is published, without samples."""
    plain: dict[str, Any] = to_plain(replace(report, series=None))
    return plain


BLOCKS = "▁▂▃▄▅▆▇█"
MISSING = "·"
MOST_STRIPS = 16


def render_terminal(report: JobReport, width: int) -> Group:
    """The report as text without markup and control characters. width: columns of the terminal."""
    parts: list[RenderableType] = [_head(report, width)]
    if report.suggestions:
        parts += [_text("What to do next time", "bold", "\n"), _suggestions(report, width - 3)]
    for finding in report.findings:
        parts += [_text(finding.title, "bold", "\n"), _text(finding.text)]
        if report.series is not None:
            parts += _picture(report, finding.picture, report.series, max(20, min(72, width - 30)))
    parts += [_text("Figures", "bold", "\n"), _figures(report)]
    return Group(*parts)


def _text(text: str, style: str = "", before: str = "", columns: int = 0) -> Text:
    """The text without control characters: a published copy may have been changed.

    columns: for a text with options, which do not break over lines.
    """
    shown = printable(text, MAX_TEXT)
    return Text(before + (_hung(shown, 0, columns) if columns and _OPTION_BLANK.search(shown) else shown), style=style)


BOX = 6
"""Columns of a box around its title."""


def _head(report: JobReport, width: int) -> RenderableType:
    """Name the job on the frame, or within if that is too narrow."""
    said = report.headline
    title = _text(f"Job {' · '.join(map(_cell, report.heading))}")
    lines = [_text(said[:1].upper() + said[1:], "bold", columns=width - 4), _text(report.verdict, columns=width - 4)]
    if title.cell_len > width - BOX:
        return Panel(Group(title, *lines), padding=(0, 1))
    return Panel(Group(*lines), title=title, title_align="left", padding=(0, 1))


def _figures(report: JobReport) -> Table:
    table = Table.grid(padding=(0, 2))
    for row in report.figures:
        table.add_row(_text(row.name, "dim"), _text(row.value, "bold"), _text(row.about))
    return table


def _suggestions(report: JobReport, columns: int) -> Table:
    table = Table.grid(padding=(0, 1))
    for number, suggestion in enumerate(report.suggestions, 1):
        table.add_row(_text(f"{number}."), _text(suggestion.advice, "bold", columns=columns))
        table.add_row("", _text(f"Why: {suggestion.reason}", "dim", columns=columns))
    return table


def _picture(report: JobReport, name: str, series: GpuSeries, columns: int) -> list[RenderableType]:
    """The chart as rows of blocks, and what a row spans; nothing for the roofline."""
    if name == "timeline" and series.has("gpu_util_pct"):
        busy = series.values["gpu_util_pct"]
        absent = f"; {MISSING} is not measured" if any(None in row for row in busy) else ""
        span = f" From left to right: {format_duration(series.span_s)}{absent}"
        return [_strips(series.units, busy, 100.0, columns, _percent), _text(span, "dim")]
    if name == "memory" and series.has("hbm_used_mib"):
        fullest = [max(_known(cells), default=None) for cells in zip(*series.values["hbm_used_mib"], strict=True)]
        top = (report.metrics or {}).get("hbm_capacity_mib") or max(_known(fullest))
        return [_strips(["memory"], [fullest], top, columns, _peak)]
    return []


def _strips(
    names: Sequence[str], values: Sequence[Cells], top: float, columns: int, said: Callable[[list[float]], str]
) -> RenderableType:
    """A row of blocks for each of the first MOST_STRIPS GPUs, and how many more there are."""
    table = Table.grid(padding=(0, 1))
    for name, row in zip(names[:MOST_STRIPS], values, strict=False):
        known = _known(row)
        strip = Text(blocks(row, top, columns), style="cyan", no_wrap=True)
        table.add_row(Text(printable(name, 24)), strip, Text(said(known) if known else "not measured"))
    if len(names) > MOST_STRIPS:
        table.add_row("", Text(f"and {len(names) - MOST_STRIPS} more GPUs (--html shows all)", style="dim"), "")
    return Padding(table, (0, 0, 0, 1))


def blocks(row: Cells, top: float, columns: int) -> str:
    """The values as at most `columns` characters, each the mean of a part of the time, from 0 to top."""
    parts = min(columns, len(row))
    length, longer = divmod(len(row), parts) if parts else (0, 0)
    cuts = [place * length + min(place, longer) for place in range(parts + 1)]
    return "".join(_block(_known(row[low:high]), top) for low, high in pairwise(cuts))


def _block(known: list[float], top: float) -> str:
    if not known:
        return MISSING
    place = int(sum(known) / len(known) / top * len(BLOCKS)) if top > 0 else 0
    return BLOCKS[min(max(place, 0), len(BLOCKS) - 1)]


def _known(cells: Cells) -> list[float]:
    return [cell for cell in cells if cell is not None]


def _percent(known: list[float]) -> str:
    return f"{sum(known) / len(known):.0f}%"


def _peak(known: list[float]) -> str:
    return f"peak {format_gib(max(known))}"


SHORT_S = 60
"""Below two samples of 30 s, jobstats stores "Short" in place of data."""


def jobstats_document(report: JobReport) -> dict[str, Any]:
    """The document that `jobstats --json` prints: nodes, total_time (run time in s), and gpus (allocated).

    Each node has gpu_used_memory (highest) and gpu_total_memory in bytes, and gpu_utilization (mean, percent), each by
    GPU index (PrincetonUniversity/jobstats, `Jobstats.__str__`). As in jobstats, figures that are not known are left
    out: CPU time and host memory of each node, and the utilization of a MIG instance. Several instances of one GPU have
    one index, so all of them are left out.
    """
    nodes: dict[str, dict[str, dict[str, float]]] = {}
    number = Counter((row["host"], row["gpu"]) for row in report.gpus)
    for row in report.gpus:
        for key, value in _jobstats_figures(row).items() if number[row["host"], row["gpu"]] == 1 else ():
            nodes.setdefault(row["host"], {}).setdefault(key, {})[str(row["gpu"])] = value
    return {"nodes": nodes, "total_time": report.elapsed_s, "gpus": report.gpu_count}


def jobstats_comment(report: JobReport) -> str:
    """The text that jobstats keeps in AdminComment: "JS1:" and the packed JSON, or "JS1:Short" or "JS1:None"."""
    from telemetry.sources.sacct import PREFIX

    document = jobstats_document(report)
    if report.elapsed_s is not None and report.elapsed_s < SHORT_S:
        return f"{PREFIX}Short"
    if not document["nodes"] or document["total_time"] is None:
        return f"{PREFIX}None"
    text = json.dumps(document, separators=(",", ":"), sort_keys=True, allow_nan=False)
    return PREFIX + base64.b64encode(gzip.compress(text.encode("ascii"), mtime=0)).decode("ascii")


def _jobstats_figures(row: GpuRow) -> dict[str, float]:
    """The known figures of a GPU, or of a MIG instance. Readers of one memory figure expect the other.

    jobstats has no utilization of MIG instances, and its readers expect none.
    """
    from telemetry.sources.sacct import MIB

    found: dict[str, float] = {}
    peak_mib, total_mib, util_pct = row["hbm_peak_mib"], row["hbm_capacity_mib"], row["mean_gpu_util_pct"]
    if peak_mib is not None and total_mib is not None and peak_mib <= total_mib:
        found = {"gpu_used_memory": round(peak_mib * MIB), "gpu_total_memory": round(total_mib * MIB)}
    return found if util_pct is None or row["mig"] else {**found, "gpu_utilization": round(util_pct, 1)}
