"""`almanac train`: fit the predictors to the jobs in the store."""

from __future__ import annotations

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, progress, show_table


@click.command("train")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.pass_obj
def command(app: App, as_json: bool) -> None:
    """Fit the duration and memory predictors to what the store holds, and say how good they are.

    The newest share of the jobs (training.validation_share) is predicted from the older ones; the scores are
    taken there, beside simple baselines.
    """
    from advisor.artefacts import save
    from advisor.service import train
    from telemetry.history import load_history

    store = app.open_store()
    cluster = app.cluster(store)
    history = load_history(store, cluster)
    with progress("train") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        trained = train(history, app.config, app.now_s())
    version = save(trained, store.models_dir(cluster))
    if as_json:
        click.echo(json_text({"version": version, "jobs": trained.jobs, "scores": trained.scores}))
        return
    click.echo(f"trained on {format_count(trained.jobs)} GPU jobs of {cluster}: version {version}")
    _show_scores(trained.scores)


def _show_scores(scores: dict[str, float]) -> None:
    """Rows are the predictors: a score without a prefix is almanac's own, "global_median.spearman" a baseline's."""
    names = ["", *sorted({name.partition(".")[0] for name in scores if "." in name})]
    kinds = {"spearman": "Spearman", "median_abs_log_error": "median |log error|", "share_within_2x": "within 2x"}
    rows = []
    for name in names:
        values = [scores.get(f"{name}.{kind}" if name else kind) for kind in kinds]
        if any(value is not None for value in values):
            cells = ["-" if value is None else f"{value:.3f}" for value in values]
            rows.append([name.replace("_", " ") or "almanac", *cells])
    columns = ["duration predicted by", *kinds.values()]
    if rows:
        show_table(columns, rows, right=columns[1:])
    else:
        click.echo("too few jobs to train and score a model: the rolling estimate is used alone")
