"""`almanac jobs`: past jobs with what they used."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import NotAllowedError
from almanac.units import DAY_S, format_count, printable
from cli.app import App
from cli.job_ids import no_such_job, search_jobs
from cli.job_table import JOB_COLUMNS, say_published, show_columns, show_jobs, show_wide_jobs
from cli.output import json_text, show_table, write_separated
from cli.selection import COUNT, check_columns, full_states, parse_limits, words_of
from cli.steps import show_steps
from cli.times import check_span, local_time, time_option
from telemetry.job_selection import JobQuery, QueryResult, UnknownTextError, Words, select_jobs

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "user", "account", "partition", "name", "name_key", "state",
    "node_count", "gpu_count", "elapsed_s", "tier", "hbm_peak_mib", "hbm_capacity_mib", "hbm_evidence",
    "mean_gpu_util_pct", "coverage_frac", "verdict", "hbm_peak_frac", "spatial_imbalance", "temporal_imbalance",
    "main_pipe", "job_class", "energy_j", "idle_gpu_count", "mig_profile",
)  # fmt: skip
"""The default columns of JSON, CSV, and -P."""
PREALLOCATED = "preallocated"
"""A word of --verdict that stands in another column, hbm_evidence."""
SHOWN_DAYS = 30
JSON, TABLE = "json", ""
"""Ways to print. Any other one is the character that separates the values of a line."""


@click.command("jobs")
@click.option("-S", "--starttime", metavar="TIME", help="Jobs submitted from here on. [30 days before -E; -j: any]")
@click.option("-E", "--endtime", metavar="TIME", help="Jobs submitted before. [now]")
@click.option("-u", "--user", metavar="USER", help="Another user's jobs (operators).")
@click.option("-a", "--allusers", is_flag=True, help="Everybody's jobs (operators).")
@click.option("-j", "--job", "job_ids", multiple=True, metavar="ID[,ID]", help="Only 12, 12_3, 12_[1-3], or 12+1.")
@click.option("-A", "--account", "account", multiple=True, metavar="NAME[,NAME]", help="Only jobs of these accounts.")
@click.option("--partition", "partition", multiple=True, metavar="NAME[,NAME]", help="Only jobs of these partitions.")
@click.option(
    "--state", "state", multiple=True, metavar="STATE[,STATE]", help="Only jobs in these states, such as OOM."
)
@click.option("--tier", "tier", multiple=True, metavar="NAME[,NAME]", help="Only jobs that asked for these tiers.")
@click.option(
    "--verdict", "verdict", multiple=True, metavar="WORD", help="Only jobs with this data quality, such as ok."
)
@click.option(
    "--class",
    "job_class",
    type=click.Choice(["compute", "memory"]),
    help="Only jobs of this class, by their most used pipe.",
)
@click.option("--min", "lows", multiple=True, metavar="COLUMN=NUMBER", help="Only jobs with at least this value.")
@click.option("--max", "highs", multiple=True, metavar="COLUMN=NUMBER", help="Only jobs with at most this value.")
@click.option("--sort", metavar="[-]COLUMN", help="Lowest first; with -, highest first. [end_s]")
@click.option(
    "-n", "--limit", type=COUNT, metavar="N", default=50, help="Newest jobs, or first of --sort; 0: all. [50]"
)
@click.option("-w", "--wide", is_flag=True, help="Show more columns, on lines of about 160 characters.")
@click.option("-o", "--columns", "chosen", multiple=True, metavar="COLUMN[,COLUMN]", help="Columns to show.")
@click.option("-e", "--helpformat", is_flag=True, help="List the columns of -o, --sort, --min, and --max.")
@click.option("--steps", is_flag=True, help="Show the steps of these jobs instead, with their use.")
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
    as_json: bool,
    as_csv: bool,
    parsable: bool,
    job_ids: tuple[str, ...],
    **filters: Any,
) -> None:
    """List past GPU jobs, newest last: size, time, utilization, peak memory, and what to do next time.

    You see your own jobs; operators see everybody's with -a, -u, or -j. Without access to the store, you see your
    newest jobs as last published for you.

    A filter leaves out jobs with an unknown value, and the command prints how many. For the ten most uneven jobs of at
    least 8 GPUs, type --min gpu_count=8 --sort -spatial_imbalance -n 10. docs/characterize.md explains the columns.
    """
    if helpformat:
        return _show_columns()
    if as_json + as_csv + parsable > 1:
        raise click.UsageError("--json, --csv, and -P exclude each other: choose one")
    if bool(chosen) + steps + wide > 1:
        raise click.UsageError("-o, --steps, and --wide exclude each other, because each has columns of its own")
    if steps and not app.may_read_store:
        raise NotAllowedError(f"{app.caller} cannot read the store, and steps are not published", "ask an operator")
    query = _query(app, bool(job_ids), filters)
    names = words_of(chosen)
    check_columns("--columns", names, _columns_of("any"))
    form = JSON if as_json else "," if as_csv else "|" if parsable else TABLE
    if job_ids:
        query = dataclasses.replace(query, job_ids=_named(app, job_ids, is_table=form == TABLE))
    found = _select(app, query, _columns_for(names, form, is_wide=wide, has_steps=steps))
    if steps and (found.rows or form != TABLE):
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
    return None


def _query(app: App, names_jobs: bool, filters: dict[str, Any]) -> JobQuery:
    """The query of these options, without job ids. names_jobs: there are some, so of any time, and of any owner."""
    if filters["allusers"] and not app.is_operator:
        raise NotAllowedError(f"{app.caller} is not an operator, and can see only their own jobs", "leave out -a")
    sort, user = filters["sort"], filters["user"]
    is_of_all = not user and (filters["allusers"] or (names_jobs and app.is_operator))
    whose = None if is_of_all else app.visible_user(user)  # before anything else is read or imported
    check_columns("--sort", [sort.removeprefix("-")] if sort else [], _columns_of("sortable"))
    until_s = time_option(filters["endtime"], app.now_s())
    since_s = time_option(filters["starttime"], app.now_s())
    if since_s is None and not names_jobs:
        since_s = (app.now_s() if until_s is None else until_s) - SHOWN_DAYS * DAY_S
    query = JobQuery(
        since_s=since_s,
        until_s=until_s,
        user=whose,
        words=_words(app, filters),
        limits=parse_limits(filters["lows"], filters["highs"], _columns_of("number")),
        sort=sort,
        limit=filters["limit"],
    )
    check_span(query.since_s, query.until_s)
    return query


def _named(app: App, texts: Sequence[str], *, is_table: bool) -> tuple[int, ...]:
    """The raw ids of the jobs named; ids that name none are listed on stderr.

    Raises StoreError if a table would be empty. Programs get no rows instead.
    """
    found = search_jobs(app, texts)
    if found.absent and (found.ids or not is_table):
        click.echo(f"note: {no_such_job(app, found.absent)}", err=True)
    elif found.absent:
        raise no_such_job(app, found.absent)
    return found.ids or (-1,)


def _columns_for(names: Sequence[str], form: str, *, is_wide: bool, has_steps: bool) -> Sequence[str]:
    """The columns to read. names: the columns chosen, if any."""
    if has_steps or (is_wide and form == TABLE):
        return (*COLUMNS, "job")
    if names or form != TABLE:
        return names or COLUMNS
    from reports.job.next_step import COLUMNS as NEXT_COLUMNS

    return tuple(dict.fromkeys((*JOB_COLUMNS, *NEXT_COLUMNS)))


def _select(app: App, query: JobQuery, columns: Sequence[str]) -> QueryResult:
    """The jobs that the caller may see and asked for. Raises click.BadParameter if no job has a filter's text."""
    try:
        return select_jobs(app.caller_jobs.history, query, columns)
    except UnknownTextError as error:
        raise click.BadParameter(str(error), param_hint=error.option) from error


def _words(app: App, filters: dict[str, Any]) -> tuple[Words, ...]:
    """The filters by text. Slurm's states and the configured tiers are valid even if no job has them."""
    from telemetry.sources.sacct_text import STATES

    known = {"state": STATES, "tier": frozenset(tier.name for tier in app.config.tiers)}
    given = {name: words_of(filters[name]) for name in ("account", "partition", "state", "tier", "verdict")}
    given["state"] = full_states(given["state"])
    found = [Words(f"--{name}", name, texts, known.get(name, frozenset())) for name, texts in given.items() if texts]
    if PREALLOCATED in given["verdict"]:
        if len(given["verdict"]) > 1:
            raise click.BadParameter(f"{PREALLOCATED} goes alone", param_hint="--verdict")
        found = [word for word in found if word.option != "--verdict"]
        found.append(Words("--verdict", "hbm_evidence", (PREALLOCATED,), frozenset({PREALLOCATED})))
    if filters["job_class"]:
        classes = frozenset({"compute", "memory"})
        found.append(Words("--class", "job_class", (filters["job_class"],), classes, is_metric=True))
    return tuple(found)


def _columns_of(kind: str) -> list[str]:
    """Columns that can be shown (any), sorted by (no lists), or limited (numbers)."""
    import pyarrow as pa

    from telemetry.history import HISTORY

    def fits(field: pa.Field[Any]) -> bool:
        if kind == "number":
            return pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        return kind == "any" or not pa.types.is_list(field.type)

    return [field.name for field in HISTORY if fits(field)]


def _print(found: QueryResult, columns: Sequence[str], form: str) -> None:
    """Print the rows for programs. form: JSON, or what separates the values of a line."""
    if form == JSON:
        click.echo(json_text(found.rows))
    else:
        write_separated(columns, found.rows, form, is_for_spreadsheets=form == ",")


def _show_columns() -> None:
    from telemetry.history import UNITS

    rows = [[name, UNITS.get(name, "")] for name in _columns_of("any")]
    show_table(["column", "unit or meaning"], rows, is_whole=True)


def _show(app: App, found: QueryResult, names: Sequence[str], *, is_wide: bool, has_user: bool) -> None:
    """Print the rows as a table. names: the columns chosen, if any."""
    if names:
        show_columns(names, found.rows)
    elif is_wide:
        show_wide_jobs(found.rows)
    else:
        from reports.job.next_step import next_steps
        from reports.job.site_choices import choices_of

        since_s = app.now_s() - app.config.advice.history_days * DAY_S
        rules = choices_of(app.config).rules
        steps = next_steps(found.rows, app.config.tiers, app.caller_jobs.history, since_s, rules)
        show_jobs(found.rows, steps, has_user=has_user)
        click.echo("`almanac report JOB` explains a job, and what to do next time")


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
