"""`almanac backtest power`: how many nodes could have been powered down, by a record from the store or from a file."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.config import Config, NodeSet
from almanac.errors import CommandError, ConfigError, RequestError, StoreError
from almanac.units import DAY_S, format_count, number_text, printable
from cli.app import App
from cli.output import Advance, BacktestResult, ScoreTable, plot_file, progress, show_counts

if TYPE_CHECKING:
    import numpy as np

    from advisor.power.backtest import JobDelays, PowerBacktest, PowerScore
    from almanac.config import Power
    from telemetry.power.demand import Accounted
    from telemetry.power.series import NodeRuns, NodeSeries

RECORD_DAYS = 400
"""Older demand is not read, because it says little about today's."""


@click.command("power")
@click.option("--node-set", "set_name", default="", metavar="NAME",
              help="Node set of the configuration. [the only one]")  # fmt: skip
@click.option(
    "--series", "path", metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Read nodes per minute from a .parquet or .csv file instead of the store. Columns: time, active, total, and "
    "optionally wanted.",
)  # fmt: skip
@click.option("-S", "--starttime", metavar="TIME", help="Start of the scored time. [--tune-until]")
@click.option("-E", "--endtime", metavar="TIME", help="End of the scored time. [end of the record]")
@click.option("--train-until", metavar="TIME", help="End of the training time. [2/3 of the time before -S]")
@click.option("--tune-until", metavar="TIME", help="End of the time for choosing settings. [-S, or 3/4 of the record]")
@click.option("--boots", metavar="B", type=click.FloatRange(min=0),
              help="Budget: nodes booted per day. [power.boots_per_node x nodes of the set]")  # fmt: skip
@click.option("--wakeups", metavar="W", type=click.FloatRange(min=0),
              help="Budget: wake-ups per day. [power.wakes_per_day]")  # fmt: skip
@click.option("--shortage", metavar="S", type=click.FloatRange(min=0),
              help="Budget: minutes per day with too few nodes. [power.short_min_per_day]")  # fmt: skip
@click.option("--vc", default="", metavar="NAME,...",
              help="Use only rows of the file with NAME in column vc. Several names are one pool.")  # fmt: skip
@click.option("--gpus-per-node", type=click.IntRange(1, 64), default=8, show_default=True,
              help="GPUs per node, for files that count GPUs.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the forecast.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), callback=plot_file,
              help="Also draw the nodes. Replaces the .png, .svg, or .pdf file.")  # fmt: skip
@click.pass_obj
def power(app: App, /, path: Path | None, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Replay power controllers on the record of a node set.

    The record is the accounting in the store (for operators only), or a file of nodes per minute. The back-test trains
    on the oldest part, chooses settings for your budget on the next part, and scores the rest. It decides every 10
    minutes from earlier minutes only. It changes no node.
    """
    options |= {name: value for name, value in configured(app.config).items() if options.get(name) is None}
    with progress("record") as advance:
        record = read_file(path, options) if path else read_store(app, options, advance)
    outcome, delays = _replay(record, options, app.config.power)
    if not as_json:
        show_counts(record.name, record.series.counts, record.unit)
        for reason, minutes in record.series.marks.items():
            click.echo(f"  {format_count(minutes)} minutes excluded: {reason}")
    _result(record, outcome, delays, options, app.config.cost.currency or "money").show(as_json, plot)


def _replay(record: PowerRecord, options: dict[str, Any], power: Power) -> tuple[PowerBacktest, dict[str, JobDelays]]:
    from advisor.power.backtest import Rates, backtest_power, delays_in, spans_of
    from advisor.power.forecast import load_holidays
    from advisor.power.lifecycle import budget_of, typical_nodes
    from advisor.power.replay import Plant

    names = ("train_until", "tune_until", "starttime", "endtime")
    with more_needed(record):
        spans = spans_of(record.series, *(parse_time(options[name], name) for name in names))
    given = {"boots_per_day": "boots", "short_min_per_day": "shortage", "wakes_per_day": "wakeups"}
    budget = dataclasses.replace(
        budget_of(power, typical_nodes(record.series)),
        **{field: options[name] for field, name in given.items() if options[name] is not None},
    )
    options["budget"] = budget
    plant = dataclasses.replace(Plant.configured(power), boot_min=options["boot"])
    rates = Rates(options["idle_watts"], options["pue"], max(0.0, options["price"]), options["co2"])
    with progress("backtest") as advance:
        outcome = backtest_power(
            record.series, spans, budget, seed=options["seed"],
            plant=plant, rates=rates, holidays=load_holidays(options["holidays"]), tick=advance,
        )  # fmt: skip
    rows = slice(spans.score, spans.end)
    return outcome, delays_in(record.runs, record.series, rows, outcome.shortage) if record.runs else {}


def _result(
    record: PowerRecord, outcome: PowerBacktest, delays: dict[str, JobDelays], options: dict[str, Any], currency: str
) -> BacktestResult:
    def picture(kind: str) -> bytes:
        from reports.replay_plots import render_power_plot

        return render_power_plot(record.name, record.series, outcome, kind)

    series = record.series
    times = {key: str(series.times()[0] + getattr(outcome.spans, key)) for key in ("tune", "score", "end")}
    facts = {
        "series": record.name, "node_set": record.node_set, "nodes": record.nodes,
        record.unit: series.counts.seen, "kept": series.counts.kept, "dropped": dict(series.counts.dropped),
        "unusable_minutes": series.marks, "spans": times, "days": outcome.days,
        "budget": options["budget"],
        "boot_min": options["boot"], "seed": options["seed"], "utilization_before": outcome.utilization_before,
        "controllers": [
            {**vars(score), "money": score.money if options["price"] >= 0 else None,
             "jobs": delays.get(score.controller)}
            for score in outcome.scores
        ],
        "forecasts": outcome.trials, "forecast_used": outcome.used, "settings": outcome.settings,
        "notes": outcome.notes,
    }  # fmt: skip
    return BacktestResult(facts, _text(outcome, delays, options, currency), outcome.comparison, picture)


def _text(
    outcome: PowerBacktest, delays: dict[str, JobDelays], options: dict[str, Any], currency: str
) -> list[str | ScoreTable]:
    def late(score: PowerScore, name: str, form: str) -> str:
        return number_text(getattr(delays.get(score.controller), name, None), form)

    replayed = ScoreTable(
        (
            ("controller", lambda each: each.controller),
            ("asleep", lambda each: f"{each.asleep:.1f}"),
            ("boots", lambda each: f"{each.boots_per_day:.1f}"),
            ("wakes", lambda each: number_text(each.wakes_per_day, ".2f")),
            ("short", lambda each: f"{each.short_min_per_day:.2f}"),
            ("late", lambda each: late(each, "delayed", ",")),
            ("mean min", lambda each: late(each, "mean_min", ".1f")),
            ("max min", lambda each: late(each, "longest_min", ",")),
            ("used", lambda each: number_text(each.utilization, ".1%")),
        ),
        outcome.scores,
    )
    is_priced = options["price"] >= 0
    saved = ScoreTable(
        (
            ("saved by", lambda each: each.controller),
            ("kWh", lambda each: format_count(round(each.kwh))),
            (currency, lambda each: format_count(round(each.money)) if is_priced else "-"),
            ("t CO2", lambda each: f"{each.co2_kg / 1000:.1f}"),
        ),
        outcome.scores,
    )
    jobs = max((each.jobs for each in delays.values()), default=0)
    own = options["budget"]
    wakes = "" if own.wakes_per_day is None else f"{own.wakes_per_day:g} wake-ups, "
    budget = f"{own.boots_per_day:g} node boots, {wakes}{own.short_min_per_day:g} min with too few nodes"
    use = f"node use without power saving: {outcome.utilization_before:.1%}; used: share of powered nodes in use"
    return [
        f"scored {outcome.days:.1f} days; budget per day: {budget}",
        f"note: forecast: {outcome.reason}",
        *(f"note: {printable(note, 300)}" for note in outcome.notes),
        replayed, use,
        f"late: delayed jobs, of {format_count(jobs)}\n" if delays else "late: unknown, because the file has no jobs\n",
        saved, *([] if is_priced else [f"{currency}: unknown; set cost.per_kwh"]),
    ]  # fmt: skip


@dataclass(frozen=True)
class PowerRecord:
    """A record to score controllers on. unit: what series.counts counts. runs, node_set, nodes: from the store only."""

    name: str
    series: NodeSeries
    unit: str
    runs: NodeRuns | None = None
    node_set: str | None = None
    nodes: int | None = None


def configured(config: Config) -> dict[str, Any]:
    """Values of the budget, unless options give them, and of the site. A price below 0 is not configured."""
    power = config.power
    return {
        "shortage": power.short_min_per_day, "boot": power.boot_min,
        "idle_watts": max(0.0, power.idle_watts - power.asleep_watts), "pue": power.pue, "price": config.cost.per_kwh,
        "co2": power.co2_kg_per_kwh, "holidays": power.holidays,
    }  # fmt: skip


def read_file(path: Path, options: dict[str, Any]) -> PowerRecord:
    """Read nodes per minute from a file. Raises click.UsageError if --node-set is given, FileFormatError."""
    from telemetry.power.series import read_node_series

    if options["set_name"]:
        raise click.UsageError("--node-set selects from the store, but --series names a file: use --vc instead")
    series = read_node_series(path, options["vc"], options["gpus_per_node"])
    return PowerRecord(options["vc"] or path.stem, series, "rows")


def read_store(app: App, options: dict[str, Any], advance: Advance) -> PowerRecord:
    """Read a node set's demand from the store: the newest RECORD_DAYS days, or those before -E.

    Raises NotAllowedError, ConfigError, StoreError, RequestError, CommandError, click.UsageError.
    """
    from telemetry.power.demand import accounted_demand, known_span, with_counts

    if options["vc"]:
        raise click.UsageError("--vc selects from a file: add --series FILE, or use --node-set instead")
    app.require_operator("a back-test reads all users' jobs")
    node_set = chosen_set(app.config, options["set_name"])
    store = app.store
    names = _names(app, node_set)
    known_s = known_span(store)
    if known_s[1] <= known_s[0]:
        raise StoreError(
            f"{store.root}: the store holds no ended job of {store.cluster}",
            "run `almanac ingest`, or give a file of nodes per minute with --series",
        )
    until = parse_time(options["endtime"], "endtime")
    end_s = min(known_s[1], app.now_s())  # a clock that was ahead leaves a watermark in the future
    end_s = end_s if until is None else min(end_s, int(until.astype("int64")))
    start_s = max(known_s[0], end_s - RECORD_DAYS * DAY_S)
    if end_s <= start_s:
        first, last = (dt.datetime.fromtimestamp(second, dt.UTC).isoformat(" ", "minutes")[:16] for second in known_s)
        raise RequestError(f"-E is before the record, which is from {first} to {last}", "give a later -E")
    accounted = accounted_demand(store, node_set, names, start_s, end_s, advance)
    _require_runs(accounted, node_set, names, store.cluster)
    series = with_counts(store, node_set, names, accounted)
    return PowerRecord(f"{store.cluster} {node_set.name}", series, "jobs", accounted.runs, node_set.name, len(names))


def chosen_set(config: Config, name: str) -> NodeSet:
    """The node set of this name, or the only one. Raises ConfigError, click.BadParameter."""
    sets = {one.name: one for one in config.node_sets}
    if not sets:
        raise ConfigError(
            "the configuration names no node set",
            'add a [[node_sets]] table with name = "gpu" and nodes = "gpu[001-064]", or give --series FILE',
        )
    known = ", ".join(sets)
    if name and name not in sets:
        raise click.BadParameter(
            f"there is no node set {printable(name)!r}; choose one of: {known}", param_hint="--node-set"
        )
    if not name and len(sets) > 1:
        raise ConfigError(f"{len(sets)} node sets are configured", f"choose one with --node-set: {known}")
    return sets[name] if name else config.node_sets[0]


def _names(app: App, node_set: NodeSet) -> tuple[str, ...]:
    from cli.models import node_names

    try:
        names = node_names(app, node_set)
    except CommandError as error:
        raise CommandError(
            f"node set {node_set.name}: Slurm did not list its nodes: {error}",
            'run this where slurmctld answers, or select the nodes by name: nodes = "gpu[001-064]"',
        ) from error
    if not names:
        raise ConfigError(f"node set {node_set.name} has no nodes", "correct its nodes, feature, or partition")
    return names


def _require_runs(accounted: Accounted, node_set: NodeSet, names: tuple[str, ...], cluster: str) -> None:
    from telemetry.power.demand import NO_NODES

    if len(accounted.runs):
        return
    lacking = accounted.counts.dropped[NO_NODES]
    said = f"; {format_count(lacking)} jobs ran, but have no node list" if lacking else ""
    raise ConfigError(
        f"node set {node_set.name}: none of its {len(names)} nodes ({names[0]}, ...) ran a job of {cluster}{said}",
        "compare its nodes with those of `sacct -a -X -o NodeList`",
    )


@contextmanager
def more_needed(record: PowerRecord) -> Iterator[None]:
    """Tell how to get a longer record if that from the store is too short."""
    try:
        yield
    except RequestError as error:
        if record.runs is None:
            raise
        days = len(record.series) / 1440
        raise RequestError(
            f"{error} (the store holds the demand of {days:.1f} days)",
            f"{error.hint}, or ingest older jobs: `almanac ingest --source sacct -S TIME`",
        ) from error


def parse_time(text: str | None, name: str) -> np.datetime64 | None:
    """A time in UTC, s. Raises click.BadParameter, which names the option."""
    import numpy as np

    if text is None:
        return None
    try:
        when = dt.datetime.fromisoformat(text.strip())
    except ValueError as error:
        said = f"not a time: {printable(text)!r} (expected YYYY-MM-DD[THH:MM[:SS]], in UTC)"
        raise click.BadParameter(said, param_hint=f"--{name.replace('_', '-')}") from error
    return np.datetime64(when.astimezone(dt.UTC).replace(tzinfo=None) if when.tzinfo else when, "s")
