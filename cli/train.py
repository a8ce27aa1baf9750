"""`almanac train`: fit the predictors to the jobs in the store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, progress
from cli.scores import scores_table, show_scores

if TYPE_CHECKING:
    import pandas as pd


@click.command("train")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.pass_obj
def command(app: App, as_json: bool) -> None:
    """Fit the duration and memory predictors to what the store holds, and say how good they are. For operators.

    The newest share of the jobs (training.validation_share) is predicted from the older ones; the scores are
    taken there, beside simple baselines.
    """
    from advisor.artefacts import save
    from advisor.baselines import OURS
    from advisor.lifecycle import faults_of
    from advisor.service import train
    from advisor.versions import prune
    from telemetry.history import load_history

    app.require_operator("training looks at everybody's jobs")
    store = app.open_store()
    cluster = app.cluster(store)
    history = load_history(store, cluster, running=True)
    drift = _drift(app, store.models_dir(cluster), history)
    with progress("train") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        trained = train(history, app.config, app.now_s())
    version = save(trained, store.models_dir(cluster))
    prune(store.models_dir(cluster), app.config.training.keep_versions)
    faults = faults_of(trained, app.config, app.now_s())
    if as_json:
        click.echo(json_text({"version": version, "jobs": trained.jobs, "has_model": trained.model is not None,
                              "scores": scores_table(trained.scores), "drift": drift, "faults": faults}))  # fmt: skip
        return
    for alarm in drift:
        click.echo(f"drift: {alarm}")
    click.echo(f"trained on {format_count(trained.jobs)} GPU jobs of {cluster}: version {version}")
    for fault in faults:
        click.echo(f"the new duration model is not used: {fault}")
    if trained.model is None:
        click.echo(f"fewer than {app.config.training.min_jobs} jobs: no model, the rolling estimate is used alone")
        return
    show_scores("duration predicted by", trained.scores, OURS)


def _drift(app: App, models_dir: Path, history: pd.DataFrame) -> list[str]:
    """What is amiss with the version used until now; a version that cannot be read is replaced without a word."""
    from advisor.artefacts import load
    from advisor.lifecycle import drift_of
    from almanac.errors import AlmanacError

    try:
        trained = load(models_dir)
    except AlmanacError:
        return []
    drift = drift_of(trained, history, app.config, app.now_s()) if trained else None
    return list(drift.alarms) if drift else []
