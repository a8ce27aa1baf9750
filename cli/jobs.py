"""`almanac jobs`: past jobs with what they used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from almanac.errors import NotAllowedError, StoreError
from almanac.units import DAY_S, format_count, format_moment, printable
from cli.app import COUNT, App
from cli.job_table import JOB_COLUMNS, say_published, show_columns, show_jobs, show_live, show_wide_jobs
from cli.output import json_text, local_time, show_table, write_separated
from cli.selection import (
    JobQuery,
    Limit,
    QueryResult,
    UnknownTextError,
    Words,
    check_columns,
    check_span,
    full_states,
    parse_limits,
    parse_wheres,
    select_jobs,
    time_option,
    words_of,
)  # fmt: skip
from reports.published.caller import NEXT_COLUMNS
from slurm.named_jobs import named_jobs
from slurm.states import JOB_STATES

COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "user", "account", "partition", "name", "name_key", "state",
    "node_count", "gpu_count", "elapsed_s", "tier", "hbm_peak_mib", "hbm_capacity_mib", "hbm_evidence",
    "mean_gpu_util_pct", "coverage_frac", "verdict", "hbm_peak_frac", "spatial_imbalance", "temporal_imbalance",
    "main_pipe", "mfu_frac", "job_class", "energy_j", "idle_gpu_count", "mig_profile",
)  # fmt: skip
"""The default columns of JSON, CSV, and -P."""
KNOWN = {"job_class": frozenset({"compute", "memory"}), "hbm_evidence": frozenset({"preallocated"})}
"""Texts that are valid even if no job has them."""
SHOWN_DAYS = 30
NO_ROUND = "not known: `almanac watch` made no round in the last 10 minutes; `almanac report JOB` asks Slurm"
JSON, TABLE = "json", ""
"""Ways to print. Any other one is the character that separates the values of a line."""


@click.command("jobs")
@click.option("-S", "--starttime", metavar="TIME", help="Jobs submitted from here on. [30 days before -E; -j: any]")
@click.option("-E", "--endtime", metavar="TIME", help="Jobs submitted before. [now]")
@click.option("--ended-since", metavar="TIME", help="Jobs that ended since then, whenever submitted.")
@click.option("-u", "--user", metavar="USER", help="Another user's jobs (operators).")
@click.option("-a", "--allusers", is_flag=True, help="Everybody's jobs (operators).")
@click.option("-j", "--job", "job_ids", multiple=True, metavar="ID[,ID]", help="Only 12, 12_3, 12_[1-3], or 12+1.")
@click.option("-A", "--account", "account", multiple=True, metavar="NAME[,NAME]", help="Only jobs of these accounts.")
@click.option("--partition", "partition", multiple=True, metavar="NAME[,NAME]", help="Only jobs of these partitions.")
@click.option(
    "--state", "state", multiple=True, metavar="STATE[,STATE]", help="Only jobs in these states, such as OOM."
)
@click.option(
    "--where",
    "wheres",
    multiple=True,
    metavar="COLUMN=TEXT[,TEXT]",
    help="Only jobs with this text, such as verdict=ok.",
)
@click.option("--min", "lows", multiple=True, metavar="COLUMN=NUMBER", help="Only jobs with at least this value.")
@click.option("--max", "highs", multiple=True, metavar="COLUMN=NUMBER", help="Only jobs with at most this value.")
@click.option("--sort", metavar="[-]COLUMN", help="Lowest first; with -, highest first. [end_s]")
@click.option(
    "-n", "--limit", type=COUNT, metavar="N", default=50, help="Newest jobs, or first of --sort; 0: all. [50]"
)
@click.option("-w", "--wide", is_flag=True, help="Show more columns, on lines of about 160 characters.")
@click.option("-o", "--columns", "chosen", multiple=True, metavar="COLUMN[,COLUMN]", help="Columns to show.")
@click.option("-e", "--helpformat", is_flag=True, help="List the columns of -o, --sort, --where, --min, and --max.")
@click.option("--steps", is_flag=True, help="Show the steps of these jobs instead, with their use.")
@click.option("--running", is_flag=True, help="Only running jobs, as `almanac watch` last saw them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, safe to open in a spreadsheet.")
@click.option("-P", "--parsable", is_flag=True, help="Print text separated by '|', as sacct -P.")
@click.pass_obj
def command(
    app: App,
    /,
    chosen: tuple[str, ...],
    wide: bool,
    helpformat: bool,
    steps: bool,
    running: bool,
    as_json: bool,
    as_csv: bool,
    parsable: bool,
    job_ids: tuple[str, ...],
    **filters: Any,
) -> None:
    """List past GPU jobs, newest last: size, time, utilization, peak memory, and what to do next time.

    Where operators run `almanac watch`, your running jobs follow, with what they do now.
    You see your own jobs; operators see everybody's with -a, -u, or -j. Without access to the store, you see your
    newest jobs as last published for you.

    A filter leaves out jobs with an unknown value, and the command prints how many. For the ten most uneven jobs of at
    least 8 GPUs, type --min gpu_count=8 --sort -spatial_imbalance -n 10. docs/characterize.md explains the columns.
    """
    if helpformat:
        return _show_columns(app)
    if running:
        given = {name for name in click.get_current_context().params if _is_given(name)}
        if given - {"running", "user", "allusers", "as_json"}:
            raise click.UsageError("--running goes with -u, -a, and --json only")
        user = _whose(app, filters, is_of_all=filters["allusers"])
        return _show_running(app, user, is_json=as_json, has_user=filters["allusers"], is_alone=True)
    if as_json + as_csv + parsable > 1:
        raise click.UsageError("--json, --csv, and -P exclude each other: choose one")
    if bool(chosen) + steps + wide > 1:
        raise click.UsageError("-o, --steps, and --wide exclude each other, because each has columns of its own")
    if steps and not app.may_read_store:
        raise NotAllowedError(f"{app.caller} cannot read the store, and steps are not published", "ask an operator")
    query = _query(app, bool(job_ids), filters)
    names = words_of(chosen)
    check_columns("--columns", names, _columns_of(app))
    form = JSON if as_json else "," if as_csv else "|" if parsable else TABLE
    if job_ids:
        query = dataclasses.replace(query, job_ids=_named(app, job_ids, is_table=form == TABLE))
    found = _select(app, query, _columns_for(names, form, is_wide=wide, has_steps=steps))
    if steps and (found.rows or form != TABLE):
        from cli.steps import show_steps

        show_steps(app, found.rows, as_json=as_json, separator="" if as_json else form)
    elif form != TABLE:
        _print(found, names or COLUMNS, form)
    elif not found.rows:
        _say_none(query, found)
    else:
        has_user = any(row.get("user") not in (app.caller, filters["user"]) for row in found.rows)
        _show(app, found, names, is_wide=wide, has_user=has_user or filters["allusers"])
        _say_hidden(found, query)
    if found.note:
        click.echo(found.note, err=form != TABLE)
    if form == TABLE:
        say_published(app)
        if not (names or steps or wide or job_ids or query.words or query.limits or query.sort or query.until_s):
            _show_running(app, query.user, is_json=False, has_user=filters["allusers"])
    return None


def _show_running(app: App, user: str | None, *, is_json: bool, has_user: bool, is_alone: bool = False) -> None:
    """Print the running jobs of a user, or of all. is_alone: say so if there are none."""
    found = app.caller_jobs.live(app.now_s())
    jobs = [job for job in found.jobs if user in (None, job.user)] if found else []
    if is_json:
        rows = [vars(job) for job in jobs]
        click.echo(json_text({"as_of_s": found.written_s if found else None, "jobs": rows}))
    elif jobs and found:
        click.echo(f"{'' if is_alone else chr(10)}running, as of {local_time(found.written_s)}:")
        show_live(jobs, app.now_s(), has_user=has_user)
    elif is_alone:
        click.echo("no running GPU job" if found else NO_ROUND)


def _query(app: App, names_jobs: bool, filters: dict[str, Any]) -> JobQuery:
    """The query of these options, without job ids. names_jobs: there are some, so of any time, and of any owner."""
    sort, is_of_all = filters["sort"], filters["allusers"] or (names_jobs and app.is_operator)
    whose = _whose(app, filters, is_of_all=is_of_all)  # before anything else is read or imported
    check_columns("--sort", [sort.removeprefix("-")] if sort else [], _columns_of(app, "number", "text"))
    until_s = time_option(filters["endtime"], app.now_s())
    since_s = time_option(filters["starttime"], app.now_s())
    ended_s = time_option(filters["ended_since"], app.now_s())
    if since_s is None and not names_jobs and ended_s is None:
        since_s = (app.now_s() if until_s is None else until_s) - SHOWN_DAYS * DAY_S
    query = JobQuery(
        since_s=since_s,
        until_s=until_s,
        user=whose,
        words=_words(app, filters),
        limits=(
            *parse_limits(filters["lows"], filters["highs"], _columns_of(app, "number")),
            *(() if ended_s is None else [Limit("end_s", low=ended_s)]),
        ),
        sort=sort,
        limit=filters["limit"],
    )
    check_span(query.since_s, query.until_s)
    return query


def _whose(app: App, filters: dict[str, Any], *, is_of_all: bool) -> str | None:
    """The one user whose jobs are asked for; None for all. Raises NotAllowedError."""
    if filters["allusers"] and not app.is_operator:
        raise NotAllowedError(f"{app.caller} is not an operator, and can see only their own jobs", "leave out -a")
    return None if is_of_all and not filters["user"] else app.visible_user(filters["user"])


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def _named(app: App, texts: Sequence[str], *, is_table: bool) -> tuple[int, ...]:
    """The raw ids of the jobs named; ids that name none are listed on stderr.

    Raises StoreError if a table would be empty (programs get no rows instead), and RequestError.
    """
    wanted = named_jobs(texts)
    rows = app.caller_jobs.runs_named(sorted({each.job_id for each in wanted}))
    ids = tuple(dict.fromkeys(job_id for each in wanted for job_id in each.among(rows)))
    if absent := [each.text for each in wanted if not each.among(rows)]:
        as_of_s = app.caller_jobs.published_s
        since = f" (last changed {format_moment(as_of_s)})" if as_of_s else ""
        error = StoreError(
            f"not in your list of ended GPU jobs{since}: {printable(', '.join(absent))}",
            f"see any job, at any time: almanac report {printable(absent[0], 40)}",
        )
        if not ids and is_table:
            raise error
        click.echo(f"note: {error}", err=True)
    return ids or (-1,)


def _columns_for(names: Sequence[str], form: str, *, is_wide: bool, has_steps: bool) -> Sequence[str]:
    """The columns to read. names: the columns chosen, if any."""
    if has_steps or (is_wide and form == TABLE):
        return (*COLUMNS, "job")
    if names or form != TABLE:
        return names or COLUMNS

    return tuple(dict.fromkeys(("submit_s", *JOB_COLUMNS, *NEXT_COLUMNS)))


def _select(app: App, query: JobQuery, columns: Sequence[str]) -> QueryResult:
    """The jobs that the caller may see and asked for. Raises click.BadParameter if no job has a filter's text."""
    try:
        return select_jobs(app.caller_jobs.history, query, columns)
    except UnknownTextError as error:
        raise click.BadParameter(str(error), param_hint=error.option) from error


def _words(app: App, filters: dict[str, Any]) -> tuple[Words, ...]:
    """The filters by text. Slurm's states and the configured tiers are valid even if no job has them."""
    known = {"state": frozenset(JOB_STATES), "tier": frozenset(tier.name for tier in app.config.tiers)} | KNOWN
    given = [(f"--{name}", name, filters[name]) for name in ("account", "partition", "state")]
    wheres: dict[str, list[str]] = {}
    for name, text in parse_wheres(filters["wheres"], _columns_of(app, "text")):
        wheres.setdefault(name, []).append(text)
    given += [("--where", name, texts) for name, texts in wheres.items()]
    read = {"state": full_states}
    return tuple(
        Words(option, name, words, known.get(name, frozenset()), is_metric=name == "job_class")
        for option, name, texts in given
        if (words := read.get(name, words_of)(texts))
    )


def _columns_of(app: App, *kinds: str) -> list[str]:
    """The columns of these kinds, or of all."""
    return [name for name, column in app.caller_jobs.columns.items() if not kinds or column.kind in kinds]


def _print(found: QueryResult, columns: Sequence[str], form: str) -> None:
    """Print the rows for programs. form: JSON, or what separates the values of a line."""
    if form == JSON:
        click.echo(json_text(found.rows))
    else:
        write_separated(columns, found.rows, form, is_for_spreadsheets=form == ",")


def _show_columns(app: App) -> None:
    rows = [[name, column.about] for name, column in app.caller_jobs.columns.items()]
    show_table(["column", "unit or meaning"], rows, is_whole=True)


def _show(app: App, found: QueryResult, names: Sequence[str], *, is_wide: bool, has_user: bool) -> None:
    """Print the rows as a table. names: the columns chosen, if any."""
    if names:
        show_columns(names, found.rows)
    elif is_wide:
        show_wide_jobs(found.rows)
    else:
        show_jobs(found.rows, app.caller_jobs.next_steps(found.rows), has_user=has_user)
        click.echo("`almanac report JOB` explains a job and what to do next")


def _say_hidden(found: QueryResult, query: JobQuery) -> None:
    """Say how many jobs are not shown."""
    if hidden := found.matching - len(found.rows):
        others = "others" if query.sort else "older ones"
        click.echo(f"{format_count(hidden)} {others} are not shown; --limit 0 shows all")


def _say_none(query: JobQuery, found: QueryResult) -> None:
    if found.total:
        click.echo(f"none of {format_count(found.total)} jobs matches")
    elif query.job_ids:
        click.echo("these jobs have not ended, used no GPU, or do not match -S, -E, or -u")
        click.echo("`almanac report JOB` says how a job without GPUs ended")
    else:
        since = local_time(query.since_s or 0)
        whose = printable(query.user or "anybody")
        click.echo(f"no GPU jobs of {whose} submitted since {since}; see -S, -E, -a, -u, -M")
