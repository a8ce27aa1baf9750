"""`almanac backtest power`: how many nodes could have slept."""

from __future__ import annotations

import dataclasses
import datetime as dt
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count, printable
from cli.output import json_text, progress, show_counts, show_table

if TYPE_CHECKING:
    import numpy as np

    from advisor.backtest.power import PowerBacktest, PowerScore
    from telemetry.node_series import NodeSeries

PLOT_KINDS = ("png", "svg", "pdf")


def plot_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Refused before the replay, which takes long."""
    if path is None:
        return None
    if path.suffix.lower().removeprefix(".") not in PLOT_KINDS:
        raise click.BadParameter(f"{printable(path.name)!r} must end in one of .{', .'.join(PLOT_KINDS)}")
    if not path.parent.is_dir():
        raise click.BadParameter(f"there is no folder {printable(str(path.parent))!r}")
    return path


@click.command("power")
@click.option(
    "--series", "path", required=True, metavar="FILE", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Nodes per minute, .parquet or .csv: columns time, active, total, and optionally wanted.",
)  # fmt: skip
@click.option("-S", "--starttime", metavar="TIME", help="Score from here on. [--tune-until]")
@click.option("-E", "--endtime", metavar="TIME", help="Score up to here. [end of the file]")
@click.option("--train-until", metavar="TIME", help="Train on what lies before. [two thirds of what is not scored]")
@click.option("--tune-until", metavar="TIME", help="Choose settings on what lies between. [-S, or 3/4 of the file]")
@click.option("--wakeups", metavar="W", type=click.FloatRange(min=0), default=1.0, show_default=True,
              help="Wake-ups that you accept per day.")  # fmt: skip
@click.option("--shortage", metavar="S", type=click.FloatRange(min=0), default=2.0, show_default=True,
              help="Minutes per day that you accept with too few nodes.")  # fmt: skip
@click.option("--vc", default="", metavar="NAME", help="Only the rows whose column vc is NAME.")
@click.option("--gpus-per-node", type=click.IntRange(1, 64), default=8, show_default=True,
              help="For files that count GPUs.")  # fmt: skip
@click.option("--boot", metavar="MINUTES", type=click.IntRange(0, 120), default=5, show_default=True,
              help="Time until a woken node is up.")  # fmt: skip
@click.option("--idle-watts", type=click.FloatRange(min=0), default=800.0, show_default=True,
              help="Power of an idle node.")  # fmt: skip
@click.option("--pue", type=click.FloatRange(min=1), default=1.5, show_default=True, help="Power usage effectiveness.")
@click.option("--price", type=click.FloatRange(min=0), default=0.15, show_default=True, help="Money per kWh.")
@click.option("--co2", type=click.FloatRange(min=0), default=0.4, show_default=True, help="kg of CO2 per kWh.")
@click.option("--holidays", default="", metavar="COUNTRY", help="Public holidays to use, such as US or CN.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the forecast.")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), callback=plot_file,
              help="Draw the nodes too, into a .png, .svg or .pdf file, which is replaced.")  # fmt: skip
def power(path: Path, as_json: bool, plot: Path | None, **options: Any) -> None:
    """Replay power controllers on a file of nodes per minute.

    Trains on the oldest part, chooses settings for your budget on the next, and scores the rest. Decisions are taken
    every 10 minutes and see only earlier minutes. Nothing is done to any node.
    """
    from telemetry.node_series import read_node_series

    series = read_node_series(path, options["vc"], options["gpus_per_node"])
    outcome = _replay(series, options)
    name = options["vc"] or path.stem
    if plot:
        _write_plot(plot, name, series, outcome)
    if as_json:
        click.echo(json_text(_as_json(name, series, outcome, options)))
        return
    show_counts(path.name, series.counts, "rows")
    for reason, minutes in series.marks.items():
        click.echo(f"  {format_count(minutes)} minutes not used: {reason}")
    _show(outcome, options)


def _replay(series: NodeSeries, options: dict[str, Any]) -> PowerBacktest:
    from advisor.backtest.power import Budget, Rates, backtest_power, spans_of
    from advisor.demand.features import load_holidays

    names = ("train_until", "tune_until", "starttime", "endtime")
    spans = spans_of(series, *(_time(options[name], name) for name in names))
    rates = Rates(options["idle_watts"], options["pue"], options["price"], options["co2"])
    with progress("backtest") as advance:
        return backtest_power(
            series, spans, Budget(options["wakeups"], options["shortage"]), seed=options["seed"],
            boot_min=options["boot"], rates=rates, holidays=load_holidays(options["holidays"]), tick=advance,
        )  # fmt: skip


def _time(text: str | None, name: str) -> np.datetime64 | None:
    import numpy as np

    if text is None:
        return None
    try:
        when = dt.datetime.fromisoformat(text.strip())
    except ValueError as error:
        said = f"not a time: {printable(text)!r} (expected YYYY-MM-DD[THH:MM[:SS]], in UTC)"
        raise click.BadParameter(said, param_hint=f"--{name.replace('_', '-')}") from error
    return np.datetime64(when.astimezone(dt.UTC).replace(tzinfo=None) if when.tzinfo else when, "s")


def _write_plot(path: Path, name: str, series: NodeSeries, outcome: PowerBacktest) -> None:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs where it keeps its list of fonts
    from reports.power_plot import render_power_plot
    from telemetry.atomic import write_output

    write_output(path, render_power_plot(name, series, outcome, path.suffix.lower().removeprefix(".")))


def _as_json(name: str, series: NodeSeries, outcome: PowerBacktest, options: dict[str, Any]) -> dict[str, Any]:
    times = {key: str(series.times()[0] + getattr(outcome.spans, key)) for key in ("tune", "score", "end")}
    return {
        "series": name, "rows": series.counts.seen, "kept": series.counts.kept, "dropped": dict(series.counts.dropped),
        "unusable_minutes": series.marks, "spans": times, "days": outcome.days,
        "budget": {"wakes_per_day": options["wakeups"], "short_min_per_day": options["shortage"]},
        "seed": options["seed"], "utilization_before": outcome.utilization_before,
        "controllers": [dataclasses.asdict(score) for score in outcome.scores],
        "forecasts": [_without_nan(dataclasses.asdict(skill)) for skill in outcome.skills],
        "settings": dataclasses.asdict(outcome.settings), "notes": outcome.notes,
    }  # fmt: skip


def _without_nan(values: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values.items()}


def _show(outcome: PowerBacktest, options: dict[str, Any]) -> None:
    click.echo(
        f"scored {outcome.days:.1f} days; budget: {options['wakeups']:g} wake-ups and {options['shortage']:g} short "
        f"minutes a day"
    )
    for note in outcome.notes:
        click.echo(f"note: {printable(note, 300)}")
    columns = ["controller", "asleep", "wakes/d", "nodes", "short/d", "used", "kWh", "money", "t CO2"]
    show_table(columns, [_row(score) for score in outcome.scores], right=columns[1:])
    click.echo(f"nodes in use of all nodes: {outcome.utilization_before:.1%}; used: of those that stay powered")


def _row(score: PowerScore) -> list[str]:
    return [
        score.controller, f"{score.asleep:.1f}", f"{score.wakes_per_day:.2f}",
        "-" if score.nodes_per_wake is None else f"{score.nodes_per_wake:.1f}", f"{score.short_min_per_day:.2f}",
        "-" if score.utilization is None else f"{score.utilization:.1%}", format_count(round(score.kwh)),
        format_count(round(score.money)), f"{score.co2_kg / 1000:.1f}",
    ]  # fmt: skip
