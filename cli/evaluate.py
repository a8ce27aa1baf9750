"""`almanac evaluate`: replay the duration predictions and score them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, progress
from cli.scores import scores_table, show_scores

if TYPE_CHECKING:
    from advisor.evaluation.durations import Evaluation

TABLES = {
    "all": "all jobs, predicted by",
    "users": "median over users, predicted by",
    "warm": "jobs of known users, predicted by",
    "cold": "jobs of new users, predicted by",
}


@click.command("evaluate")
@click.option(
    "--share",
    default=0.4,
    show_default=True,
    type=click.FloatRange(0.05, 0.9),
    help="Share of the jobs to predict, the newest ones.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.pass_obj
def command(app: App, share: float, as_json: bool) -> None:
    """Predict the newest jobs in order of submission, and score the predictions beside simple baselines. For operators.

    The replay retrains the models every training.retrain_hours on the jobs that had ended by then. It predicts each job
    from what was known at its submission. It writes nothing.
    """
    from advisor.duration.baselines import OURS
    from advisor.duration.intervals import COVERAGE
    from advisor.evaluation.durations import evaluate
    from telemetry.history import load_history

    app.require_operator("an evaluation reads all users' jobs")
    store = app.cluster_store()
    history = load_history(store, running=True)
    with progress("evaluate") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        result = evaluate(history, app.config, share)
    if as_json:
        click.echo(json_text(_as_json(store.cluster, result)))
        return
    if result.since_s is None:
        click.echo(f"{store.cluster}: no job has ended yet, so there is nothing to predict")
        return
    since = datetime.fromtimestamp(result.since_s, UTC).strftime("%Y-%m-%d %H:%M")
    trainings = format_count(result.trainings)
    click.echo(f"{format_count(result.jobs)} GPU jobs of {store.cluster} since {since} UTC, {trainings} trainings")
    for name, title in TABLES.items():
        show_scores(title, getattr(result, name), OURS, "users" if name == "users" else "jobs")
    if result.coverage is not None:
        goal = f"goal: {COVERAGE:.0%}{_by_quarter(result)}"
        click.echo(f"{result.coverage:.0%} of jobs ended within their predicted interval ({goal})")
        click.echo(f"{result.told:.0%} of the intervals are narrow enough to show")


def _by_quarter(result: Evaluation) -> str:
    shares = ", ".join(f"{share:.0%}" for share in result.coverage_by_quarter)
    return f"; by quarter, oldest first: {shares}" if shares else ""


def _as_json(cluster: str, result: Evaluation) -> dict[str, object]:
    """cluster, jobs, trainings, since_s, coverage, coverage_by_quarter, told; by each of TABLES scores by predictor."""
    return {
        "cluster": cluster,
        "jobs": result.jobs,
        "trainings": result.trainings,
        "since_s": result.since_s,
        "coverage": result.coverage,
        "coverage_by_quarter": list(result.coverage_by_quarter),
        "told": result.told,
        **{name: scores_table(getattr(result, name)) for name in TABLES},
    }
