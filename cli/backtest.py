"""`almanac backtest`: compare what almanac would have advised with what happened."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count
from cli.app import App
from cli.backtest_follow import read_tier_nodes, show_followed
from cli.backtest_power import plot_file, power
from cli.backtest_priority import priority
from cli.backtest_type import gpu_type
from cli.output import json_text, progress, show_table

if TYPE_CHECKING:
    from advisor.evaluation.tier import Rate, TierScores


@click.group("backtest")
def command() -> None:
    """Replay the site's past jobs, each with what was known at its submission."""


command.add_command(power)
command.add_command(priority)
command.add_command(gpu_type)


@command.command("tier")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.option(
    "--plot",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=plot_file,
    help="Also draw the scores. Replaces the .png, .svg, or .pdf file.",
)
@click.option("--follow", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Simulate that this share of the users follows the advice, and compare the waits.")  # fmt: skip
@click.option("--tier-nodes", multiple=True, metavar="TIER=N",
              help="Nodes of a tier in the simulation. Repeat it for each tier.")  # fmt: skip
@click.option("--gpus-per-node", type=click.IntRange(1, 64), metavar="G", default=8, show_default=True,
              help="GPUs of each simulated node.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True,
              help="Chooses the users who follow the advice.")  # fmt: skip
@click.pass_obj
def tier(
    app: App, as_json: bool, plot: Path | None, follow: float | None, tier_nodes: tuple[str, ...],
    gpus_per_node: int, seed: int,
) -> None:  # fmt: skip
    """Score the memory advice: how many jobs would have needed more than it said? For operators.

    The rates cover advised jobs with a measured peak; a job array counts once. The 95% intervals come from a bootstrap
    over users. The accepted risk is advice.risk.

    With --follow, simulate the jobs twice instead: as recorded, and as users submit them who follow the advice.
    """
    from advisor.evaluation.tier import replay_tiers, score_tiers
    from telemetry.history import load_history

    nodes = read_tier_nodes(tier_nodes, [each.name for each in app.config.tiers])
    if (follow is None) != (not nodes):
        raise click.UsageError("--follow and --tier-nodes need each other")
    if follow is not None and plot:
        raise click.UsageError("--plot draws the scores, and --follow does not compute them")
    app.require_operator("a back-test reads all users' jobs")
    store = app.cluster_store()
    history = load_history(store)
    if follow is not None:
        outcomes = replay_tiers(history, app.config)
        show_followed(app, store, history, outcomes, follow, nodes, gpus_per_node, seed, as_json)
        return
    with progress("backtest") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        scores = score_tiers(replay_tiers(history, app.config))
    if plot:
        _write_plot(plot, store.cluster, app.config.advice.risk, scores)
    if as_json:
        click.echo(
            json_text({"cluster": store.cluster, "risk": app.config.advice.risk, "groups": [_known(s) for s in scores]})
        )
        return
    click.echo(f"{store.cluster}: accepted risk {app.config.advice.risk:.2%}")
    _show(scores)


def _write_plot(path: Path, cluster: str, risk: float, scores: list[TierScores]) -> None:
    # It logs to stderr where it keeps its font list; cron would mail that.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from reports.backtest_plot import render_tier_plot
    from telemetry.store.atomic import write_output

    write_output(path, render_tier_plot(cluster, risk, scores, path.suffix.lower().removeprefix(".")))


def _known(scores: TierScores) -> dict[str, Any]:
    """NaN is not JSON: null stands for it."""
    values = dataclasses.asdict(scores)
    for name in ("exceeded_bound", "exceeded_tier"):
        values[name] = {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in values[name].items()}
    return values


def _show(scores: list[TierScores]) -> None:
    columns = [
        "group", "jobs", "advised", "down", "up", "above bound", "95%", "above tier", "95%", "GPU-h freed",
    ]  # fmt: skip
    rows = [
        [
            score.group, *map(format_count, (score.jobs, score.advised, score.moved_down, score.moved_up)),
            *_rate(score.exceeded_bound), *_rate(score.exceeded_tier), format_count(round(score.freed_gpu_hours)),
        ]
        for score in scores
    ]  # fmt: skip
    show_table(columns, rows, right=columns[1:])


def _rate(rate: Rate) -> tuple[str, str]:
    if not rate.jobs:
        return "-", ""
    return f"{rate.share:.2%}", f"{rate.low:.2%}-{rate.high:.2%}"
