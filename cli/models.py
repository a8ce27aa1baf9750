"""`almanac models`: list the trained versions, those of the node sets included, and choose which one is used."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.artefacts import roll_back, use, versions
from advisor.power.versions import demand_versions, roll_back_demand, trained_sets, use_demand
from almanac.config import NodeSet
from almanac.errors import ConfigError
from almanac.units import format_count, json_value, number_text
from cli.app import App
from cli.output import json_text, show_table
from slurm.hostlist import expand
from slurm.node_sets import members

if TYPE_CHECKING:
    from advisor.artefacts import Version
    from advisor.power.versions import DemandVersion


PREVIOUS = "previous"
"""Stands for a version in --use. Names of versions begin with their time."""
DEMAND_COLUMNS = ("", "node set", "version", "from", "to", "almanac", "forecast", "pinball loss")


def day(time_s: int | None) -> str:
    return "-" if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d")


def of_node_set(models_dir: Path, node_set: str, chosen: str | None, as_json: bool) -> None:
    """Choose the version in use, if asked to, then list the versions of one node set. Raises StoreError."""
    if chosen == PREVIOUS:
        roll_back_demand(models_dir, node_set)
    elif chosen:
        use_demand(models_dir, node_set, chosen)
    found = demand_versions(models_dir, node_set)
    if as_json:
        click.echo(json_text([_demand_json(each) for each in found]))
    elif not found:
        click.echo(f"no model is trained yet for node set {node_set}")
    else:
        show_table(DEMAND_COLUMNS, [_demand_row(node_set, each) for each in found], right=DEMAND_COLUMNS[6:])


def show_node_sets(models_dir: Path) -> None:
    """Print all versions of all node sets; nothing if there are none."""
    rows = [_demand_row(name, each) for name in trained_sets(models_dir) for each in demand_versions(models_dir, name)]
    if rows:
        click.echo()
        show_table(DEMAND_COLUMNS, rows, right=DEMAND_COLUMNS[6:])


def _demand_row(node_set: str, version: DemandVersion) -> list[str]:
    mark, trained = "*" if version.is_current else "", version.trained
    if trained is None:
        return [mark, node_set, version.name, "-", "-", "unusable", "-", "-"]

    used = trained.model.used
    span = [day(trained.since_s), day(trained.until_s)]
    return [mark, node_set, version.name, *span, trained.code_version, used.kind, f"{used.loss:.2f}"]


def _demand_json(version: DemandVersion) -> dict[str, Any]:
    found = {"name": version.name, "is_current": version.is_current, "fault": version.fault}
    trained = version.trained
    if trained is None:
        return found
    keys = ("code_version", "trained_s", "since_s", "until_s", "selection", "drift")
    model = trained.model
    return {
        **found,
        **{key: getattr(trained, key) for key in keys},
        "used": model.used.kind,
        "forecasts": json_value(model.trials),
    }


@click.command("models")
@click.option("--use", "chosen", metavar="VERSION", help="Use this version, or `previous`: the one before.")
@click.option("--node-set", metavar="NAME", help="Show or change the demand model of this node set instead.")
@click.option("--json", "as_json", is_flag=True, help="Print the versions as JSON.")
@click.pass_obj
def command(app: App, chosen: str | None, node_set: str | None, as_json: bool) -> None:
    """List the trained versions with their time spans and scores, or choose which one is used. For operators.

    `*` marks the version in use. The next training switches to its own version.
    """
    app.require_operator("the models serve all users")
    models_dir = app.store.models_dir
    if node_set is not None:
        of_node_set(models_dir, node_set, chosen, as_json)
        return
    if chosen == PREVIOUS:
        roll_back(models_dir)
    elif chosen:
        use(models_dir, chosen)
    found = versions(models_dir)
    if as_json:
        click.echo(json_text([{**vars(each), "scores": json_value(each.scores)} for each in found]))
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
    cells = [number_text(number, ".3f") for number in numbers]
    span = [day(version.since_s), day(version.until_s)]
    return [mark, version.name, format_count(version.jobs), *span, version.code_version, *cells]


def node_names(app: App, node_set: NodeSet) -> tuple[str, ...]:
    """Return the names of a set's nodes. Asks slurmctld only for a feature or a partition.

    Raises ConfigError, CommandError.
    """
    if not node_set.nodes:
        return members(node_set, app.backend.nodes())
    try:
        return tuple(expand(node_set.nodes))
    except ValueError as error:
        raise ConfigError(
            f"node set {node_set.name}: {node_set.nodes!r} is not a hostlist: {error}", "write it as gpu[001-064]"
        ) from error
