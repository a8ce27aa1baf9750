"""`almanac backtest power`: how many nodes could have been powered down."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count, printable
from cli.app import App
from cli.output import json_text, progress, show_counts, show_table
from cli.power_record import PowerRecord, configured, more_needed, parse_time, read_file, read_store

if TYPE_CHECKING:
    from advisor.evaluation.power import PowerBacktest, PowerScore
    from advisor.evaluation.power_jobs import JobDelays
    from almanac.config import Power
    from telemetry.nodes.series import NodeSeries

PLOT_KINDS = ("png", "svg", "pdf")


def plot_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refuse a bad file name before the replay, which takes long."""
    if path is None:
        return None
    if path.suffix.lower().removeprefix(".") not in PLOT_KINDS:
        raise click.BadParameter(f"{printable(path.name)!r} must end in .png, .svg, or .pdf")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {printable(str(path.parent))!r}")
    return path


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
@click.option("--wakeups", metavar="W", type=click.FloatRange(min=0),
              help="Budget: wake-ups per day. [power.wakeups_per_day]")  # fmt: skip
@click.option("--shortage", metavar="S", type=click.FloatRange(min=0),
              help="Budget: minutes per day with too few nodes. [power.short_min_per_day]")  # fmt: skip
@click.option("--vc", default="", metavar="NAME", help="Use only rows of the file with NAME in column vc.")
@click.option("--gpus-per-node", type=click.IntRange(1, 64), default=8, show_default=True,
              help="GPUs per node, for files that count GPUs.")  # fmt: skip
@click.option("--boot", metavar="MINUTES", type=click.IntRange(0, 120),
              help="Boot time of a node. [power.boot_min]")  # fmt: skip
@click.option(
    "--idle-watts",
    type=click.FloatRange(min=0),
    help="Watts saved per powered-down node. [power.idle_watts - power.asleep_watts]",
)
@click.option("--pue", type=click.FloatRange(min=1), help="Power usage effectiveness. [power.pue]")
@click.option("--price", type=click.FloatRange(min=0), help="Price of a kWh. [cost.per_kwh]")
@click.option("--co2", type=click.FloatRange(min=0), help="kg of CO2 per kWh. [power.co2_kg_per_kwh]")
@click.option("--holidays", metavar="COUNTRY", help="Country of public holidays, such as US or CN. [power.holidays]")
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
    options |= {name: value for name, value in configured(app.config).items() if options[name] is None}
    record = read_file(path, options) if path else read_store(app, options)
    outcome, delays = _replay(record, options, app.config.power)
    if plot:
        _write_plot(plot, record.name, record.series, outcome)
    if as_json:
        click.echo(json_text(_as_json(record, outcome, delays, options)))
        return
    show_counts(record.name, record.series.counts, record.unit)
    for reason, minutes in record.series.marks.items():
        click.echo(f"  {format_count(minutes)} minutes excluded: {reason}")
    _show(outcome, delays, options, app.config.cost.currency or "money")


def _replay(record: PowerRecord, options: dict[str, Any], power: Power) -> tuple[PowerBacktest, dict[str, JobDelays]]:
    from advisor.decisions.power import Budget
    from advisor.demand.features import load_holidays
    from advisor.evaluation.power import Rates, backtest_power, spans_of
    from advisor.evaluation.power_jobs import delays_in
    from advisor.evaluation.power_replay import Plant

    names = ("train_until", "tune_until", "starttime", "endtime")
    with more_needed(record):
        spans = spans_of(record.series, *(parse_time(options[name], name) for name in names))
    plant = dataclasses.replace(Plant.configured(power), boot_min=options["boot"])
    rates = Rates(options["idle_watts"], options["pue"], max(0.0, options["price"]), options["co2"])
    with progress("backtest") as advance:
        outcome = backtest_power(
            record.series, spans, Budget(options["wakeups"], options["shortage"]), seed=options["seed"],
            plant=plant, rates=rates, holidays=load_holidays(options["holidays"]), tick=advance,
        )  # fmt: skip
        return outcome, delays_in(record.runs, record.series, outcome) if record.runs else {}


def _write_plot(path: Path, name: str, series: NodeSeries, outcome: PowerBacktest) -> None:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs where it keeps its font list
    from reports.power_plot import render_power_plot
    from telemetry.store.atomic import write_output

    write_output(path, render_power_plot(name, series, outcome, path.suffix.lower().removeprefix(".")))


def _as_json(
    record: PowerRecord, outcome: PowerBacktest, delays: dict[str, JobDelays], options: dict[str, Any]
) -> dict[str, Any]:
    series = record.series
    times = {key: str(series.times()[0] + getattr(outcome.spans, key)) for key in ("tune", "score", "end")}
    scores = [dataclasses.asdict(score) for score in outcome.scores]
    for score in scores:
        late = delays.get(score["controller"])
        score |= {"jobs": dataclasses.asdict(late) if late else None}
        score["money"] = score["money"] if options["price"] >= 0 else None
    return {
        "series": record.name, "node_set": record.node_set, "nodes": record.nodes,
        record.unit: series.counts.seen, "kept": series.counts.kept, "dropped": dict(series.counts.dropped),
        "unusable_minutes": series.marks, "spans": times, "days": outcome.days,
        "budget": {"wakes_per_day": options["wakeups"], "short_min_per_day": options["shortage"]},
        "boot_min": options["boot"], "seed": options["seed"], "utilization_before": outcome.utilization_before,
        "controllers": scores, "forecasts": [_without_nan(dataclasses.asdict(skill)) for skill in outcome.skills],
        "settings": dataclasses.asdict(outcome.settings), "notes": outcome.notes,
    }  # fmt: skip


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()}


def _show(outcome: PowerBacktest, delays: dict[str, JobDelays], options: dict[str, Any], currency: str) -> None:
    click.echo(
        f"scored {outcome.days:.1f} days; budget per day: {options['wakeups']:g} wake-ups, {options['shortage']:g} min "
        f"with too few nodes"
    )
    for note in outcome.notes:
        click.echo(f"note: {printable(note, 300)}")
    columns = ["controller", "asleep", "wakes/d", "nodes", "short/d", "late", "mean min", "max min", "used"]
    show_table(columns, [_row(score, delays.get(score.controller)) for score in outcome.scores], right=columns[1:])
    jobs = max((late.jobs for late in delays.values()), default=0)
    click.echo(f"node use without power saving: {outcome.utilization_before:.1%}; used: share of powered nodes in use")
    click.echo(
        f"late: delayed jobs, of {format_count(jobs)}\n" if delays else "late: unknown, because the file has no jobs\n"
    )
    columns = ["saved by", "kWh", currency, "t CO2"]
    show_table(columns, [_saved(score, options["price"] >= 0) for score in outcome.scores], right=columns[1:])
    if options["price"] < 0:
        click.echo(f"{currency}: unknown; give --price, or set cost.per_kwh")


def _row(score: PowerScore, late: JobDelays | None) -> list[str]:
    return [
        score.controller, f"{score.asleep:.1f}", f"{score.wakes_per_day:.2f}",
        "-" if score.nodes_per_wake is None else f"{score.nodes_per_wake:.1f}", f"{score.short_min_per_day:.2f}",
        "-" if late is None else format_count(late.delayed),
        "-" if late is None or late.mean_min is None else f"{late.mean_min:.1f}",
        "-" if late is None or late.longest_min is None else format_count(late.longest_min),
        "-" if score.utilization is None else f"{score.utilization:.1%}",
    ]  # fmt: skip


def _saved(score: PowerScore, is_priced: bool) -> list[str]:
    money = format_count(round(score.money)) if is_priced else "-"
    return [score.controller, format_count(round(score.kwh)), money, f"{score.co2_kg / 1000:.1f}"]
