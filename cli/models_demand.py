"""`almanac models`: the versions of the demand models of the node sets."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cli.output import json_text, show_table

if TYPE_CHECKING:
    from advisor.demand.versions import DemandVersion

COLUMNS = ("", "node set", "version", "from", "to", "almanac", "forecasts used", "pinball loss")


def day(time_s: int | None) -> str:
    return "-" if time_s is None else datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d")


def of_node_set(models_dir: Path, node_set: str, chosen: str | None, rollback: bool, as_json: bool) -> None:
    """Choose the version in use, if asked to, then list the versions of one node set. Raises StoreError."""
    from advisor.demand.versions import demand_versions, roll_back_demand, use_demand

    if chosen:
        use_demand(models_dir, node_set, chosen)
    if rollback:
        roll_back_demand(models_dir, node_set)
    found = demand_versions(models_dir, node_set)
    if as_json:
        click.echo(json_text([_as_json(each) for each in found]))
    elif not found:
        click.echo(f"no model is trained yet for node set {node_set}")
    else:
        show_table(COLUMNS, [_row(node_set, each) for each in found], right=COLUMNS[6:])


def show_node_sets(models_dir: Path) -> None:
    """All versions of all node sets; nothing if there are none."""
    from advisor.demand.versions import demand_versions, trained_sets

    rows = [_row(name, each) for name in trained_sets(models_dir) for each in demand_versions(models_dir, name)]
    if rows:
        click.echo()
        show_table(COLUMNS, rows, right=COLUMNS[6:])


def _row(node_set: str, version: DemandVersion) -> list[str]:
    mark, trained = "*" if version.is_current else "", version.trained
    if trained is None:
        return [mark, node_set, version.name, "-", "-", "unusable", "-", "-"]
    from advisor.demand.lifecycle import expected_loss

    skills = trained.model.forecaster.skills
    used = f"{sum(skill.is_model_used for skill in skills)} of {len(skills)}"
    span = [day(trained.since_s), day(trained.until_s)]
    return [mark, node_set, version.name, *span, trained.code_version, used, f"{expected_loss(skills):.2f}"]


def _as_json(version: DemandVersion) -> dict[str, Any]:
    found = {"name": version.name, "is_current": version.is_current, "fault": version.fault}
    trained = version.trained
    if trained is None:
        return found
    keys = ("code_version", "trained_s", "since_s", "until_s", "selection", "drift")
    skills = [vars(skill) for skill in trained.model.forecaster.skills]
    return {**found, **{key: getattr(trained, key) for key in keys}, "forecasts": skills}
