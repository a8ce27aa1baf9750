"""`almanac jobs`: past jobs with what they used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import NotAllowedError
from almanac.units import format_count, printable
from cli.app import App
from cli.job_table import local_time, say_published, show_columns, show_jobs
from cli.output import json_text, write_separated
from cli.selection import check_columns, parse_limits, words_of
from cli.steps import show_steps
from cli.times import time_option
from telemetry.job_selection import JobQuery, QueryResult, UnknownTextError, Words, select_jobs

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS = (
    "job_id", "submit_s", "start_s", "end_s", "user", "account", "partition", "name", "name_key", "state",
    "node_count", "gpu_count", "elapsed_s", "tier", "hbm_peak_mib", "hbm_capacity_mib", "hbm_evidence",
    "mean_gpu_util_pct", "coverage_frac", "verdict", "hbm_peak_frac", "spatial_imbalance", "temporal_imbalance",
    "main_pipe", "job_class", "energy_j", "idle_gpu_count",
)  # fmt: skip
"""The default columns of JSON, CSV, and -P."""


@click.command("jobs")
@click.option("-S", "--starttime", metavar="TIME", help="Jobs submitted from here on. [now-30days]")
@click.option("-E", "--endtime", metavar="TIME", help="Jobs submitted before. [now]")
@click.option("-u", "--user", metavar="USER", help="Another user's jobs (operators).")
@click.option("-a", "--allusers", is_flag=True, help="Everybody's jobs (operators).")
@click.option("-j", "--job", "job_ids", multiple=True, metavar="ID[,ID]", help="Only these jobs.")
@click.option("-A", "--account", "account", multiple=True, metavar="NAME[,NAME]", help="Only jobs of these accounts.")
@click.option("--partition", "partition", multiple=True, metavar="NAME[,NAME]", help="Only jobs of these partitions.")
@click.option("--state", "state", multiple=True, metavar="STATE[,STATE]", help="Only jobs in these states.")
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
@click.option("-n", "--limit", default=50, show_default=True, help="Newest jobs shown, or first of --sort; 0: all.")
@click.option("-o", "--columns", "chosen", multiple=True, metavar="COLUMN[,COLUMN]", help="Columns to show.")
@click.option("--steps", is_flag=True, help="Show the steps of these jobs instead, with their use.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, safe to open in a spreadsheet.")
@click.option("-P", "--parsable", is_flag=True, help="Print text separated by '|', as sacct -P.")
@click.pass_obj
def command(
    app: App,
    /,
    starttime: str | None,
    endtime: str | None,
    user: str | None,
    allusers: bool,
    job_ids: tuple[str, ...],
    lows: tuple[str, ...],
    highs: tuple[str, ...],
    sort: str | None,
    limit: int,
    chosen: tuple[str, ...],
    steps: bool,
    as_json: bool,
    as_csv: bool,
    parsable: bool,
    **words: Any,
) -> None:
    """List past GPU jobs, newest last: size, time, peak memory, mean utilization, imbalance, class, data quality.

    You see your own jobs; operators see everybody's with -a or -u. Without access to the store, you see your newest
    jobs as last published for you.

    A filter leaves out jobs with an unknown value, and the command prints how many. For the ten most uneven jobs of at
    least 8 GPUs, type --min gpu_count=8 --sort -spatial_imbalance -n 10. docs/characterize.md explains the columns.
    """
    if allusers and not app.is_operator:
        raise NotAllowedError(f"{app.caller} is not an operator, and can see only their own jobs", "leave out -a")
    if as_json + as_csv + parsable > 1:
        raise click.UsageError("--json, --csv, and -P exclude each other: choose one")
    if steps and chosen:
        raise click.UsageError("--columns applies to jobs; --steps has columns of its own")
    if steps and not app.may_read_store:
        raise NotAllowedError(f"{app.caller} cannot read the store, and steps are not published", "ask an operator")
    query = JobQuery(
        since_s=time_option(starttime or "now-30days", app.now_s()),
        until_s=time_option(endtime, app.now_s()),
        user=None if allusers and not user else app.visible_user(user),
        job_ids=parse_ids(job_ids),
        words=_words(app, words),
        limits=parse_limits(lows, highs, _columns_of("number")),
        sort=sort,
        limit=limit,
    )
    names = words_of(chosen)
    check_columns("--columns", names, _columns_of("any"))
    check_columns("--sort", [sort.removeprefix("-")] if sort else [], _columns_of("sortable"))
    is_table = not (as_json or as_csv or parsable)
    found = _select(app, query, COLUMNS if steps else names or COLUMNS)
    if steps and (found.rows or not is_table):
        show_steps(app, found.rows, as_json=as_json, separator="|" if parsable else "," if as_csv else "")
    elif as_json:
        click.echo(json_text(found.rows))
    elif not is_table:
        write_separated(names or COLUMNS, found.rows, "|" if parsable else ",", is_for_spreadsheets=as_csv)
    elif not found.rows:
        _say_none(query, found)
    else:
        show_columns(names, found.rows) if names else show_jobs(found.rows)
        if found.matching > len(found.rows):
            others = "others" if sort else "older ones"
            click.echo(f"{format_count(found.matching - len(found.rows))} {others} are not shown; --limit 0 shows all")
    if found.note:
        click.echo(found.note, err=not is_table)
    if is_table:
        say_published(app)


def _select(app: App, query: JobQuery, columns: Sequence[str]) -> QueryResult:
    """The jobs that the caller may see and asked for. Raises click.BadParameter if no job has a filter's text."""
    try:
        return select_jobs(app.caller_jobs.history, query, columns)
    except UnknownTextError as error:
        raise click.BadParameter(str(error), param_hint=error.option) from error


def _words(app: App, given: dict[str, Any]) -> tuple[Words, ...]:
    """The filters by text. Slurm's states and the configured tiers are valid even if no job has them."""
    from telemetry.sources.file_jobs import STATES

    known = {"state": STATES, "tier": frozenset(tier.name for tier in app.config.tiers)}
    given["state"] = [text.upper() for text in given["state"]]
    job_class = given.pop("job_class")
    found = [
        Words(f"--{column}", column, words_of(texts), known.get(column, frozenset()))
        for column, texts in given.items()
        if texts
    ]
    if job_class:
        found.append(Words("--class", "job_class", (job_class,), frozenset({"compute", "memory"}), is_metric=True))
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


def parse_ids(texts: tuple[str, ...]) -> tuple[int, ...]:
    """Job ids of "12" and "12,13". Raises click.BadParameter."""
    ids = [part for text in texts for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 20 and int(part) < 2**63 for part in ids):
        named = printable(", ".join(texts), 80)
        raise click.BadParameter(f"not job ids: {named} (expected 12 or 12,13; the raw id of an array task)")
    return tuple(map(int, ids))


def _say_none(query: JobQuery, found: QueryResult) -> None:
    if found.total:
        click.echo(f"none of {format_count(found.total)} jobs matches")
        return
    since = local_time(query.since_s or 0)
    click.echo(f"no GPU jobs of {printable(query.user or 'anybody')} submitted since {since}; see -S, -E, -a, -u, -M")
