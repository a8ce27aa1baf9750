"""`almanac train`: fit the predictors to the jobs in the store."""

from __future__ import annotations

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, progress
from cli.scores import scores_table, show_scores


@click.command("train")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.pass_obj
def command(app: App, as_json: bool) -> None:
    """Fit the duration and memory predictors to what the store holds, and say how good they are.

    The newest share of the jobs (training.validation_share) is predicted from the older ones; the scores are
    taken there, beside simple baselines.
    """
    from advisor.artefacts import save
    from advisor.baselines import OURS
    from advisor.service import train
    from telemetry.history import load_history

    store = app.open_store()
    cluster = app.cluster(store)
    history = load_history(store, cluster, running=True)
    with progress("train") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        trained = train(history, app.config, app.now_s())
    version = save(trained, store.models_dir(cluster))
    if as_json:
        click.echo(json_text({"version": version, "jobs": trained.jobs, "has_model": trained.model is not None,
                              "scores": scores_table(trained.scores)}))  # fmt: skip
        return
    click.echo(f"trained on {format_count(trained.jobs)} GPU jobs of {cluster}: version {version}")
    if trained.model is None:
        click.echo(f"fewer than {app.config.training.min_jobs} jobs: no model, the rolling estimate is used alone")
        return
    show_scores("duration predicted by", trained.scores, OURS)
