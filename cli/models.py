"""`almanac models`: list the trained versions, and choose which one is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from almanac.units import format_count
from cli.app import App
from cli.models_demand import day, of_node_set, show_node_sets
from cli.output import json_text, show_table
from cli.scores import scores_table

if TYPE_CHECKING:
    from advisor.versions import Version


@click.command("models")
@click.option("--use", "chosen", metavar="VERSION", help="Use this version.")
@click.option("--rollback", is_flag=True, help="Use the version before the current one.")
@click.option("--node-set", metavar="NAME", help="Show or change the demand model of this node set instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the versions as JSON.")
@click.pass_obj
def command(app: App, chosen: str | None, rollback: bool, node_set: str | None, as_json: bool) -> None:
    """List the trained versions with their time spans and scores, or choose which one is used. For operators.

    `*` marks the version in use. The next training switches to its own version.
    """
    from advisor.versions import roll_back, use, versions

    if chosen and rollback:
        raise click.UsageError("give --use or --rollback, not both")
    app.require_operator("the models serve all users")
    models_dir = app.cluster_store().models_dir
    if node_set is not None:
        of_node_set(models_dir, node_set, chosen, rollback, as_json)
        return
    if chosen:
        use(models_dir, chosen)
    if rollback:
        roll_back(models_dir)
    found = versions(models_dir)
    if as_json:
        click.echo(json_text([{**vars(each), "scores": scores_table(each.scores)} for each in found]))
    elif not found:
        click.echo("no model is trained yet")
    else:
        show_table(
            ["", "version", "jobs", "from", "to", "almanac", "Spearman", "median |log error|"],
            [_row(each) for each in found],
            right=["jobs", "Spearman", "median |log error|"],
        )
    if not as_json:
        show_node_sets(models_dir)


def _row(version: Version) -> list[str]:
    mark = "*" if version.is_current else ""
    if version.fault:
        return [mark, version.name, "-", "-", "-", "unusable", "-", "-"]
    ours, ranking = version.scores.get("almanac"), version.scores.get("ranking")
    numbers = (ranking.spearman if ranking else None, ours.median_abs_log_error if ours else None)
    cells = ["-" if number is None or number != number else f"{number:.3f}" for number in numbers]
    span = [day(version.since_s), day(version.until_s)]
    return [mark, version.name, format_count(version.jobs), *span, version.code_version, *cells]
