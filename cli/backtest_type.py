"""`almanac backtest type`: the run time on each GPU type and the choice between types, on the store's own jobs."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import click

from almanac.submit_config import MIN_TYPE_GAIN
from almanac.units import format_count, format_duration
from cli.app import App
from cli.output import json_text, progress, show_table

if TYPE_CHECKING:
    from advisor.evaluation.gpu_type import AdviceScores, TypeScores


@click.command("type")
@click.option("--last", type=click.IntRange(1, 1_000_000), metavar="N", default=5000, show_default=True,
              help="Score the newest N jobs. All earlier jobs are history.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.pass_obj
def gpu_type(app: App, last: int, as_json: bool) -> None:
    """Score the predicted run times on GPU types, and the choice of a type by wait plus run time. For operators.

    Scores jobs of families that ran on at least two GPU types, each with what was known at its submission. The
    choice is that of `almanac advise`. The waits come from the record's own queues at that time. The error is the
    median of |ln(predicted / actual)|.
    """
    from advisor.duration.intervals import COVERAGE
    from advisor.evaluation.gpu_type import replay_types, score_advice, score_types
    from advisor.speed.runs import load_speed_runs

    app.require_operator("a back-test reads all users' jobs")
    store = app.cluster_store()
    jobs = load_speed_runs(store)
    with progress("backtest") as advance:
        advance(0, 1, f"{format_count(len(jobs))} jobs")
        outcomes = replay_types(jobs, app.config, last)
    scores, advice = score_types(outcomes), score_advice(outcomes)
    if as_json:
        groups = [dataclasses.asdict(each) for each in scores]
        click.echo(
            json_text({"cluster": store.cluster, "coverage": COVERAGE, "min_gain": MIN_TYPE_GAIN, "groups": groups,
                       "advice": dataclasses.asdict(advice)})
        )  # fmt: skip
        return
    click.echo(f"{store.cluster}: {format_count(len(outcomes))} jobs of families that ran on two or more GPU types")
    if not outcomes:
        click.echo("nothing to score: no job family has runs on two GPU types")
        return
    _show(scores, COVERAGE)
    _show_advice(advice)


def _show(scores: list[TypeScores], coverage: float) -> None:
    columns = ["run time on the type used", "jobs", "completed", "predicted", "error", f"in {coverage:.0%}"]
    rows = [
        [
            each.group, *map(format_count, (each.jobs, each.completed, each.predicted)),
            "-" if each.error is None else f"{each.error:.2f}",
            "-" if each.coverage is None else f"{each.coverage:.0%}",
        ]
        for each in scores
    ]  # fmt: skip
    show_table(columns, rows, right=columns[1:])


def _show_advice(advice: AdviceScores) -> None:
    click.echo(f"\nadvice, as at submission (another type must save {MIN_TYPE_GAIN:.0%} of the time until the end)")
    for name, number in (("another type", advice.other), ("the type used", advice.kept), ("silent", advice.silent)):
        click.echo(f"  {name:14} {format_count(number):>8}  {number / advice.jobs:5.1%}")
    if advice.wait_error_s is not None:
        click.echo(f"  expected wait on the type used: median error {format_duration(advice.wait_error_s)}")
    if advice.median_won_hours is not None:
        won = f"{advice.won_hours:,.0f} h in all, median {advice.median_won_hours:.1f} h a job"
        click.echo(f"  estimated time won: {won}")
        click.echo("  This assumes the predicted waits and run times, and that nobody else follows.")
