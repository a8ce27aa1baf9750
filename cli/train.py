"""`almanac train`: fit the predictors to the jobs in the store."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, progress, show_table

if TYPE_CHECKING:
    from advisor.scores import Scores


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
        scores = {name: _known(dataclasses.asdict(score)) for name, score in trained.scores.items()}
        click.echo(json_text({"version": version, "jobs": trained.jobs, "has_model": trained.model is not None,
                              "scores": scores}))  # fmt: skip
        return
    click.echo(f"trained on {format_count(trained.jobs)} GPU jobs of {cluster}: version {version}")
    if trained.model is None:
        click.echo(f"fewer than {app.config.training.min_jobs} jobs: no model, the rolling estimate is used alone")
        return
    _show_scores(trained.scores)


def _known(values: dict[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in values.items()}


def _show_scores(scores: Mapping[str, Scores]) -> None:
    rows = []
    for name in sorted(scores, key=lambda name: (name != "almanac", name)):
        score = scores[name]
        numbers = (score.spearman, score.median_abs_log_error, score.share_within_2x)
        cells = ["-" if math.isnan(number) else f"{number:.3f}" for number in numbers]
        rows.append([name.replace("_", " "), format_count(score.jobs), *cells])
    columns = ["duration predicted by", "jobs", "Spearman", "median |log error|", "within 2x"]
    if rows:
        show_table(columns, rows, right=columns[1:])
