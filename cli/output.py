"""Tables, text, and progress for people, JSON and separated text for programs, and times that people type."""

from __future__ import annotations

import csv
import datetime as dt
import json
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click

from almanac.atomic import write_output
from almanac.records import Counts
from almanac.units import DAY_S, HOUR_S, cell_text, format_count, format_moment, json_value, printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from advisor.backtest import Interval, MethodComparison, MethodScore
    from simulator.outcomes import PolicyRun, Timeline
    from simulator.scores import PolicyScores


WIDTH = 1000
"""Columns of a table that is not shortened: enough for any table."""
COLUMNS = 80
"""Width to which lines are wrapped."""
PLOT_KINDS = ("png", "svg", "pdf")


class Advance(Protocol):
    """Moves a progress bar: `done` of `total`, with an optional note."""

    def __call__(self, done: float, total: float, note: str = "") -> None: ...


def json_text(data: Any) -> str:
    """JSON in ASCII, so that no terminal or parser sees a raw control or bidi character."""
    return json.dumps(data, indent=2, ensure_ascii=True, allow_nan=False)


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    right: Sequence[str] = (),
    title: str = "",
    *,
    gap: int = 2,
    is_whole: bool = False,
) -> None:
    """Print a table for people; control characters in cells are escaped. In a narrow terminal, texts wrap first.

    gap: blanks between columns. is_whole: do not shorten cells, even if lines are then longer than the terminal's.
    """
    from rich.table import Table
    from rich.text import Text

    table: Table = Table(
        box=None,
        header_style="bold",
        title=title or None,
        title_justify="left",
        pad_edge=False,
        padding=(0, gap, 0, 0),
        collapse_padding=True,
    )
    for column in columns:
        is_number = column in right
        table.add_column(column, justify="right" if is_number else "left", overflow="ellipsis", no_wrap=is_number)
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    show_rich(table, None if sys.stdout.isatty() and not is_whole else WIDTH)


_END = re.compile(r" *((?:\x1b\[[0-9;]*m *)*)$", re.MULTILINE)
"""Blanks at the end of a line, among codes of style."""


def show_rich(shown: RenderableType, width: int | None) -> None:
    """Print without markup, and without blanks at the ends of lines. width: None: the terminal's."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False, width=width)
    with console.capture() as capture:
        console.print(shown)
    # Not by click, which writes UTF-8 where the locale says ASCII.
    sys.stdout.write(_END.sub(lambda match: match[1].replace(" ", ""), capture.get()))


def plot_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a bad file name before the replay, which takes long."""
    if path is None:
        return None
    if path.suffix.lower().removeprefix(".") not in PLOT_KINDS:
        raise click.BadParameter(f"{printable(path.name)!r} must end in .png, .svg, or .pdf")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {printable(str(path.parent))!r}")
    return path


class ScoreTable(NamedTuple):
    """Scores to print, one a row. columns: the title of each, and its cell for one score."""

    columns: Sequence[tuple[str, Callable[[Any], str]]]
    scores: Sequence[Any]

    def show(self) -> None:
        titles = [title for title, _ in self.columns]
        show_table(titles, [[text(score) for _, text in self.columns] for score in self.scores], right=titles[1:])


def _quiet_matplotlib() -> None:
    """Silence its log on stderr about its list of fonts; cron would mail that."""
    import logging  # late: no other command needs it

    logging.getLogger("matplotlib").setLevel(logging.ERROR)


@dataclass(frozen=True)
class BacktestResult:
    """Result of a back-test: `facts` for JSON, `text` (lines and tables) for people, and a picture of a given kind.

    comparison: almanac with its baselines and controls, for both.
    """

    facts: Mapping[str, Any]
    text: Sequence[str | ScoreTable]
    comparison: MethodComparison | None = None
    picture: Callable[[str], bytes] | None = None

    def show(self, as_json: bool, plot: Path | None = None) -> None:
        """Print it, and draw it to `plot`, a file name that `plot_file` allows."""
        if plot and self.picture:
            _quiet_matplotlib()
            write_output(plot, self.picture(plot.suffix.lower().removeprefix(".")))
        if as_json:
            compared = {"comparison": self.comparison} if self.comparison else {}
            click.echo(json_text(json_value({**self.facts, **compared})))
            return
        for part in (*self.text, *(_comparison(self.comparison) if self.comparison else ())):
            if isinstance(part, str):
                click.echo(part)
            else:
                part.show()


def _comparison(found: MethodComparison) -> list[str | ScoreTable]:
    """A table of the methods; nothing without units."""

    def interval(value: Interval | None) -> str:
        return "-" if value is None or math.isnan(value.low) else f"{value.low:.3g} to {value.high:.3g}"

    if not found.units:
        return []
    columns: list[tuple[str, Callable[[MethodScore], str]]] = [
        (found.measure, lambda each: each.method),
        ("role", lambda each: each.role),
        ("mean", lambda each: f"{each.value.mean:.3g}"),
        ("95%", lambda each: interval(each.value)),
        ("gain", lambda each: f"{each.gain.mean:.3g}" if each.gain else "-"),
        ("95%", lambda each: interval(each.gain)),
    ]
    span = f"almanac's gain over each, by {found.blocks} {found.block}"
    return [f"\n{span}", ScoreTable(columns, found.methods)]


def write_separated(
    columns: Sequence[str], rows: Sequence[Mapping[str, Any]], delimiter: str, *, is_for_spreadsheets: bool = False
) -> None:
    """Print separated text with a header; cells are quoted if needed, and missing values are empty.

    is_for_spreadsheets: escape text that a spreadsheet would take for a formula.
    """
    writer = csv.writer(sys.stdout, delimiter=delimiter, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([cell_text(row[column], is_for_spreadsheets=is_for_spreadsheets) for column in columns])


def show_counts(what: str, counts: Counts, unit: str = "records") -> None:
    """Print how many records were read, kept, and dropped, with one example of each reason."""
    click.echo(f"{what}: {format_count(counts.seen)} {unit} read, {format_count(counts.kept)} kept")
    said = [(reason, number, "") for reason, number in sorted(counts.dropped.items())]
    said += [(note, number, "kept ") for note, number in sorted(counts.notes.items())]
    for reason, number, kept in said:
        example = counts.examples.get(reason, "")
        click.echo(
            f"  {format_count(number)} {kept}{printable(reason)}"
            + (f", such as: {printable(example)}" if example else "")
        )


@contextmanager
def progress(label: str) -> Iterator[Advance]:
    """Show a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total, note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None, note="")
        yield lambda done, total, note="": bar.update(task, completed=done, total=total, note=printable(note))


def say(indent: int, text: str) -> None:
    """Print text, wrapped to 80 columns or a narrower terminal; host lists are not broken."""
    spaces = " " * indent
    lines = textwrap.wrap(
        printable(text, 2000), min(shutil.get_terminal_size().columns, COLUMNS), initial_indent=spaces,
        subsequent_indent=spaces + "  ", break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    click.echo("\n".join(lines))


def show_record(rows: Sequence[Mapping[str, Any]], most: int) -> None:
    """Print the newest rows of the record, oldest first. most: 0 shows all."""
    shown = rows[-most:] if most else rows
    for row in shown:
        when = format_moment(row["time_s"]) if isinstance(row.get("time_s"), int) else "at an unknown time"
        would = "" if row.get("mode") == "apply" else "would "
        whom = row.get("nodes") or f"job {row.get('job', '?')}"
        head = "  ".join(filter(None, (when, row.get("node_set"), whom)))
        say(0, f"{head}  {would}{row.get('what', '?')}: {row.get('reason', '')}")
    if len(rows) > len(shown):
        click.echo(f"... {len(rows) - len(shown)} older rows")


def local_time(time_s: float) -> str:
    """Seconds since 1970 as "YYYY-MM-DD HH:MM" of the local time zone."""
    return dt.datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


_NAMED = 5


def short_time(seconds: float) -> str:
    """Three digits and one unit, so that eight columns fit a terminal: "12.3 h". "-" for NaN."""
    if math.isnan(seconds):
        return "-"
    size = abs(seconds)
    for limit, unit_s, unit in (
        (59.5, 1, "s"),
        (HOUR_S - 30, 60, "min"),
        (2 * DAY_S, HOUR_S, "h"),
        (math.inf, DAY_S, "d"),
    ):
        if size < limit:
            value = seconds / unit_s
            return f"{value:.0f} {unit}" if unit in ("s", "min") or abs(value) >= 99.95 else f"{value:.1f} {unit}"
    raise AssertionError(seconds)


def show_scores(
    excluded: Mapping[str, int],
    ignored: Mapping[str, int],
    scores: Sequence[PolicyScores],
    bounds_s: tuple[float, float] | None = None,
) -> None:
    """Print one row a policy. bounds_s: lower bounds of the makespan and the mean JCT, for a row of their own."""
    for line in left_out(excluded, ignored, scores):
        click.echo(line)
    rows = with_mean_draws(scores)
    columns = list(_COLUMNS) if scores[0].deadlines else [name for name in _COLUMNS if name != "met"]
    cells = [
        [score.policy, *("-" if name == "worse" and score is rows[0] else _COLUMNS[name](score) for name in columns)]
        for score in rows
    ]
    if bounds_s:
        known = {"makespan": short_time(bounds_s[0]), "JCT": short_time(bounds_s[1])}
        cells.append(["lower bound", *(known.get(name, "") for name in columns)])
    show_table(["policy", *columns], cells, right=columns)


_COLUMNS: Mapping[str, Callable[[PolicyScores], str]] = {
    "JCT": lambda score: short_time(score.all_jobs.jct_s.mean),
    "median": lambda score: short_time(score.all_jobs.jct_s.median),
    "wait": lambda score: short_time(score.all_jobs.delay_s.mean),
    "p95": lambda score: short_time(score.all_jobs.delay_s.p95),
    "longest": lambda score: short_time(score.all_jobs.delay_s.maximum),
    "makespan": lambda score: short_time(score.makespan_s),
    "busy": lambda score: share_text(score.utilization),
    "energy": lambda score: energy_text(score.energy_kwh),
    "worse": lambda score: share_text(score.against_first.worse_jobs),
    "met": lambda score: share_text(score.deadlines_met),
}
"""Title to cell. met: deadlines, if jobs have one."""


def energy_text(kwh: float) -> str:
    """Three digits and one unit."""
    for limit, unit_kwh, unit in ((999.5, 1, "kWh"), (999.5e3, 1e3, "MWh"), (math.inf, 1e6, "GWh")):
        if kwh < limit:
            value = kwh / unit_kwh
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"
    return "-"


def with_mean_draws(scores: Sequence[PolicyScores]) -> list[PolicyScores]:
    """One row for all random draws of a control, with the mean of each figure."""
    from simulator.comparison import draws_name, draws_of
    from simulator.scores import mean_of_draws

    by_policy = {score.policy: score for score in scores}
    rows = []
    for draws in draws_of(list(by_policy)):
        mean = mean_of_draws([by_policy[draw] for draw in draws], f"{len(draws)} x {draws_name(draws[0])}")
        rows.append(mean if len(draws) > 1 else by_policy[draws[0]])
    return rows


def left_out(excluded: Mapping[str, int], ignored: Mapping[str, int], scores: Sequence[PolicyScores]) -> list[str]:
    """Lines about jobs and constraints that were not simulated, and jobs that never ended."""
    lines = [f"  excluded: {format_count(count)} {printable(reason)}" for reason, count in excluded.items()]
    for text, count in sorted(ignored.items(), key=lambda each: -each[1])[:_NAMED]:
        lines.append(f"  ignored: constraint {printable(text, 60)} of {format_count(count)} jobs; no such nodes")
    said: dict[str, list[str]] = {}
    for score in scores:
        for text in _unfinished(score):
            said.setdefault(text, []).append(score.policy)
    for text, policies in said.items():
        names = [""] if len(policies) == len(scores) else [f"{printable(policy, 40)}: " for policy in policies]
        lines += [f"  {name}{text}" for name in names]
    return lines


def _unfinished(score: PolicyScores) -> list[str]:
    texts = [f"{format_count(count)} jobs never ended: they {reason}" for reason, count in score.unfinished.items()]
    if score.all_jobs.canceled:
        texts.append(f"{format_count(score.all_jobs.canceled)} jobs canceled in the queue")
    return texts


def share_text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


def simulation_json(
    facts: Mapping[str, Any], scores: Sequence[PolicyScores], runs: Sequence[PolicyRun]
) -> dict[str, Any]:
    """Facts, and all scores with the timelines of the runs that have one. NaN is not JSON: null stands for it."""
    lines = {run.policy: {"timeline": _timeline(run.timeline)} for run in runs if run.timeline}
    return {
        **json_value(facts),
        "policies": [{**json_value(score), **lines.get(score.policy, {})} for score in scores],
    }


def _timeline(line: Timeline) -> dict[str, Any]:
    """Means of bins that start at start_s."""
    return {
        "start_s": [round(edge) for edge in line.edges_s[:-1].tolist()],
        "end_s": round(float(line.edges_s[-1])),
        **{
            name: [round(value, 3) for value in getattr(line, name).tolist()]
            for name in ("busy_gpus", "fragmented_gpus", "waiting_jobs")
        },
    }


def write_plot(path: Path, title: str, runs: Sequence[PolicyRun], first: int) -> None:
    """Draw the jobs from number `first` on, and the timelines."""
    _quiet_matplotlib()
    from reports.replay_plots import PolicyCurves, render_simulation_plot

    curves = []
    for run in runs:
        known, line = run.jobs.is_known[first:], run.timeline
        assert line is not None
        curves.append(
            PolicyCurves(
                policy=run.policy,
                jct_s=run.jobs.jct_s[first:][known],
                delay_s=run.jobs.delay_s[first:][known],
                edges_s=line.edges_s,
                used=line.busy_gpus / line.gpus,
                fragmented=line.fragmented_gpus / line.gpus,
                waiting_jobs=line.waiting_jobs,
            )
        )
    write_output(path, render_simulation_plot(title, curves, path.suffix.lower().removeprefix(".")))
