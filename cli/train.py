"""`almanac train`: fit the predictors to the jobs in the store."""

from __future__ import annotations

from typing import Any

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
    from advisor.service import save, train
    from telemetry.history import load_history

    store = app.open_store()
    cluster = app.cluster(store)
    history = load_history(store, cluster)
    with progress("train") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        trained = train(history, app.config, app.now_s())
    version = save(store.root, cluster, trained)
    if as_json:
        click.echo(json_text({"version": version, **trained.as_dict()}))
        return
    click.echo(f"trained on {format_count(len(history))} GPU jobs of {cluster}: version {version}")
    _show_scores(trained.as_dict())


def _show_scores(data: dict[str, Any]) -> None:
    rows = [
        [name, _number(score["spearman"]), _number(score["median_abs_log_error"]), _number(score["within_2x"])]
        for name, score in data["duration_scores"].items()
    ]
    columns = ["duration predictor", "Spearman", "median |log error|", "within 2x"]
    show_table(columns, rows, right=columns[1:])
    bound = data["hbm_scores"]
    if bound:
        click.echo(
            f"HBM bound, back-tested: {format_count(bound['bounded'])} jobs bounded, {bound['exceeded_share']:.2%} "
            f"exceeded it (accepted: {bound['risk']:.2%}), median slack {bound['median_slack']:.0%}"
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
