"""A job's report: as an HTML mail with a plain-text twin, as one HTML file, for a terminal, and as JSON."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import css_inline
import jinja2

from advisor.explain import to_json as advice_json
from almanac import __version__
from almanac.config import Config
from almanac.units import format_moment, printable
from reports.job.conclusions import Conclusions, conclude
from reports.job.context import JobContext
from reports.job.facts import facts_of
from reports.job.figures import FigureRow, figure_rows, heading_rows
from reports.job.plots import render_plots

MAX_SUBJECT = 150
ALTS = {
    "timeline": "How busy each GPU was over time, a strip of colour for each",
    "roofline": "Roofline: what the GPUs achieved against what memory and arithmetic units allow",
    "memory": "GPU memory in use over time, against the memory tiers of this site",
}


@dataclass(frozen=True)
class Rendered:
    """A mail. subject: one line. text and html: the same in two forms. images: PNG by content id, as html names it."""

    subject: str
    text: str
    html: str
    images: Mapping[str, bytes]


@dataclass(frozen=True)
class Report:
    """What all forms of a report say."""

    context: JobContext
    conclusions: Conclusions
    heading: tuple[FigureRow, ...]
    figures: tuple[FigureRow, ...]


def report_of(context: JobContext) -> Report:
    conclusions = conclude(facts_of(context))
    return Report(context, conclusions, tuple(heading_rows(context)), tuple(figure_rows(context)))


def render_email(context: JobContext, config: Config) -> Rendered:
    """The mail to the job's owner. No part of it names anything outside the mail but by text."""
    report = report_of(context)
    plots = render_plots(context)
    images = {f"{name}.{context.job_id}@almanac": picture for name, picture in plots.items()}
    sources = {name: f"cid:{name}.{context.job_id}@almanac" for name in plots}
    return Rendered(subject_of(report), render_text(report), _html(report, sources, is_mail=True), images)


def render_page(context: JobContext) -> str:
    """One HTML file that needs no other."""
    plots = render_plots(context)
    sources = {name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in plots.items()}
    return _html(report_of(context), sources)


def subject_of(report: Report) -> str:
    """ "GPU job 1234 (train): 3 of your 4 GPUs did nothing", one line."""
    name = printable(report.context.job["name"] or "", 40)
    named = f" ({name})" if name else ""
    said = f"GPU job {report.context.shown_id}{named}: {report.conclusions.sentences[0]}"
    return printable(said, MAX_SUBJECT).rstrip(".")


def render_text(report: Report) -> str:
    """For who reads mail as text; lines of at most 78 columns but for long names."""
    return templates().get_template("job.txt.j2").render(**_given(report))


def _html(report: Report, sources: Mapping[str, str], *, is_mail: bool = False) -> str:
    pictures = [{"source": sources[name], "alt": ALTS[name]} for name in ALTS if name in sources]
    return render_html("job.html.j2", **_given(report), pictures=pictures, is_mail=is_mail)


def render_html(template: str, **given: Any) -> str:
    """A template of reports/templates as a page with its styles inline."""
    page = templates().get_template(template).render(**given)
    # In ASCII nobody can take it for another encoding, wherever the inliner puts the line that names it.
    return _inliner().inline(page).encode("ascii", "xmlcharrefreplace").decode()


def _given(report: Report) -> dict[str, Any]:
    context = report.context
    end_s = context.job["end_s"]
    return {
        "subject": subject_of(report),
        "conclusions": report.conclusions,
        "heading": report.heading,
        "figures": report.figures,
        "ended": format_moment(end_s) if end_s is not None else "",
        "has_pictures_missing": context.series is None and context.elapsed_s is not None,
        "cluster": printable(context.cluster, 60),
        "version": __version__,
    }


@cache
def templates() -> jinja2.Environment:
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
    return environment


def _folded(text: str, indent: int = 0, width: int = 78) -> str:
    """Lines of at most so many columns; the second and further ones indented."""
    return textwrap.fill(text, width, subsequent_indent=" " * indent, initial_indent=" " * indent).lstrip()


def _hung(text: str, indent: int, width: int = 78) -> str:
    """The same with a first line of full width."""
    return textwrap.fill(text, width, subsequent_indent=" " * indent)


@cache
def _inliner() -> css_inline.CSSInliner:
    """Rules within @media stay in the head: mail clients that know dark mode read them there."""
    return css_inline.CSSInliner(load_remote_stylesheets=False, keep_at_rules=True, keep_style_tags=False)


def to_json(context: JobContext) -> dict[str, Any]:
    """The report as plain values: job, verdict, suggestions, figures as texts, metrics, gpus, ranks and advice.

    Columns of metrics and gpus: docs/tables.md. What is not known is null. The samples are not in it.
    """
    report = report_of(context)
    return {
        "job_id": context.job_id,
        "shown_id": context.shown_id,
        "cluster": context.cluster,
        "job": dict(context.job),
        "earlier_runs": [dict(run) for run in context.earlier_runs],
        "verdict": report.conclusions.summary,
        "rules": list(report.conclusions.rules),
        "suggestions": [asdict(suggestion) for suggestion in report.conclusions.suggestions],
        "figures": [asdict(row) for row in report.figures],
        "gpu_hours": context.gpu_hours,
        "metrics": dict(context.metrics) or None,
        "gpus": [dict(row) for row in context.gpus],
        "ranks": {name: asdict(rank) for name, rank in context.ranks.items()},
        "advice": None if context.advice is None else advice_json(context.advice),
    }
