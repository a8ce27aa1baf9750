"""A job's report as a mail (HTML and plain text), as one HTML file, and as JSON."""

from __future__ import annotations

import base64
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jinja2
from markupsafe import Markup, escape

from advisor.explain import to_json as advice_json
from advisor.packing.text import packing_table
from almanac import __version__
from almanac.config import Config
from almanac.units import format_moment, printable
from reports.job.conclusions import Conclusions, conclude
from reports.job.context import JobContext
from reports.job.facts import facts_of
from reports.job.figures import FigureRow, figure_rows, heading_rows
from reports.job.findings import Finding, findings_of

if TYPE_CHECKING:
    import css_inline

MAX_SUBJECT, MAX_NAME = 150, 40


@dataclass(frozen=True)
class Rendered:
    """A mail. subject: one line. text, html: the same content twice. images: PNGs by the content id that html names."""

    subject: str
    text: str
    html: str
    images: Mapping[str, bytes]


@dataclass(frozen=True)
class Report:
    """The content of a report, in whatever form it is shown."""

    context: JobContext
    conclusions: Conclusions
    findings: tuple[Finding, ...]
    heading: tuple[FigureRow, ...]
    figures: tuple[FigureRow, ...]


def report_of(context: JobContext) -> Report:
    facts = facts_of(context)
    conclusions = conclude(facts)
    findings = findings_of(context, facts, conclusions.rules)
    return Report(context, conclusions, findings, tuple(heading_rows(context)), tuple(figure_rows(context)))


def render_email(context: JobContext, config: Config) -> Rendered:
    """The mail to the job's owner. It loads nothing from outside the mail."""
    report = report_of(context)
    plots = _plots(report)
    images = {f"{name}.{context.job_id}@almanac": picture for name, picture in plots.items()}
    sources = {name: f"cid:{name}.{context.job_id}@almanac" for name in plots}
    return Rendered(subject_of(report), render_text(report), _html(report, sources, is_mail=True), images)


def _plots(report: Report) -> Mapping[str, bytes]:
    """The charts of the report's findings, by name, in their order."""
    # On a terminal and in JSON there are no plots, and matplotlib takes 0.5 s to import.
    from reports.job.plots import render_plots

    found = render_plots(report.context)
    return {each.picture: found[each.picture] for each in report.findings if each.picture in found}


def render_page(context: JobContext) -> str:
    """The report as one HTML file, with its charts inside."""
    report = report_of(context)
    plots = _plots(report)
    sources = {name: f"data:image/png;base64,{base64.b64encode(png).decode()}" for name, png in plots.items()}
    return _html(report, sources)


def subject_of(report: Report) -> str:
    """The mail's subject, one line: "train-bert-100: 40 GB GPUs are enough (peak 26 of 80 GiB) [job 1234]"."""
    job = f" [job {report.context.shown_id}]"
    return printable(headline_of(report), MAX_SUBJECT - len(job)) + job


def headline_of(report: Report) -> str:
    """The first line of a report: the job's name, what happened, and what to do."""
    name = printable(report.context.job["name"] or "", MAX_NAME).strip()
    return f"{name or f'Job {report.context.shown_id}'}: {report.conclusions.headline}"


def render_text(report: Report) -> str:
    """The mail as plain text. Lines have at most 78 columns, except those with long names."""
    return templates().get_template("job.txt.j2").render(**_given(report))


def _html(report: Report, sources: Mapping[str, str], *, is_mail: bool = False) -> str:
    return render_html("job.html.j2", **_given(report), sources=sources, is_mail=is_mail)


def render_html(template: str, **given: Any) -> str:
    """A page from a template of reports/templates, with its styles inline."""
    page = templates().get_template(template).render(**given)
    # ASCII reads the same in every encoding, wherever the inliner puts the line that names one.
    return _inliner().inline(page).encode("ascii", "xmlcharrefreplace").decode()


def _given(report: Report) -> dict[str, Any]:
    context = report.context
    return {
        "subject": subject_of(report),
        "headline": headline_of(report),
        "conclusions": report.conclusions,
        "findings": report.findings,
        "kicker": _kicker(report),
        "figures": report.figures,
        "has_pictures_missing": context.series is None and context.elapsed_s is not None,
        "cluster": printable(context.cluster, 60),
        "links": context.site.links_of(context.job, context.cluster),
        "help_url": context.site.help_url,
        "job_urls": {},
        "version": __version__,
    }


def _kicker(report: Report) -> str:
    """Which job it was: "Job 1234 · train · COMPLETED · Partition gpu · Nodes n1 · ended 2026-11-17 17:00 UTC"."""
    plain = ("Name", "State")
    parts = [
        f"{'' if row.name in plain else f'{row.name} '}{row.value}{f' ({row.about})' if row.about else ''}"
        for row in report.heading
    ]
    end_s = report.context.job["end_s"]
    return " · ".join([*parts, *([] if end_s is None else [f"ended {format_moment(end_s)}"])])


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
    environment.filters["with_whole_options"] = _with_whole_options
    return environment


def _folded(text: str, indent: int = 0, width: int = 78) -> str:
    """Text wrapped for a place that already has `indent` columns on its first line; later lines are indented."""
    return _hung(" " * indent + text, indent, width).lstrip()


def _hung(text: str, indent: int, width: int = 78) -> str:
    """Text wrapped at `width` columns, with every line after the first indented."""
    # An option such as --gpu-memory-utilization stays in one piece.
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False)


def _with_whole_options(text: str) -> Markup:
    """The text as HTML in which a short option such as --time=02:00:00 is not broken at its hyphens."""
    # re.sub would escape the tags too if it were given Markup.
    return Markup(re.sub(r"--[a-z][\w=:.,/-]{0,30}", r'<span class="option">\g<0></span>', str(escape(text))))


@cache
def _inliner() -> css_inline.CSSInliner:
    """An inliner that leaves @media rules in the head, where mail clients with a dark mode read them."""
    import css_inline

    return css_inline.CSSInliner(load_remote_stylesheets=False, keep_at_rules=True, keep_style_tags=False)


def to_json(context: JobContext) -> dict[str, Any]:
    """The report as plain values: job, headline, summary (`verdict`), suggestions, figures, metrics, ranks, and advice.

    docs/tables.md lists the columns of metrics and gpus. Missing values are null. Samples are left out.
    """
    report = report_of(context)
    return {
        "job_id": context.job_id,
        "shown_id": context.shown_id,
        "cluster": context.cluster,
        "still_running": context.is_live,
        "job": dict(context.job),
        "earlier_runs": [dict(run) for run in context.earlier_runs],
        "headline": report.conclusions.headline,
        "verdict": report.conclusions.summary,
        "rules": list(report.conclusions.rules),
        "suggestions": [asdict(suggestion) for suggestion in report.conclusions.suggestions],
        "findings": [asdict(finding) for finding in report.findings],
        "figures": [asdict(row) for row in report.figures],
        "gpu_hours": context.gpu_hours,
        "metrics": dict(context.metrics) or None,
        "gpus": [dict(row) for row in context.gpus],
        "ranks": {name: asdict(rank) for name, rank in context.ranks.items()},
        "advice": None if context.advice is None else advice_json(context.advice),
        "packing": None if context.packing is None else packing_table(context.packing, context.is_array),
    }
