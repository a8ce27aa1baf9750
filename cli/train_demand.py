"""`almanac train`: the demand models of the node sets."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from almanac.config import NodeSet
from almanac.errors import AlmanacError, ConfigError
from almanac.units import printable
from cli.app import App
from cli.models_demand import day
from cli.output import progress

if TYPE_CHECKING:
    from telemetry.store.cluster_store import ClusterStore


def train_demand_models(app: App, store: ClusterStore) -> list[dict[str, Any]]:
    """Train each node set: fields of DemandTraining, or its name and a fault. A fault does not stop the other sets."""
    from advisor.demand.training import train_node_set

    if app.config.power.mode == "off":
        return []
    found: list[dict[str, Any]] = []
    with progress("demand") as advance:
        for number, node_set in enumerate(app.config.node_sets):
            advance(number, len(app.config.node_sets), node_set.name)
            try:
                names = node_names(app, node_set)
                found.append(asdict(train_node_set(store, node_set, names, app.config, app.now_s())))
            except AlmanacError as error:
                found.append({"node_set": node_set.name, "fault": f"{error}; {error.hint}"})
    return found


def node_names(app: App, node_set: NodeSet) -> tuple[str, ...]:
    """Names of a set's nodes. Asks slurmctld only for a feature or a partition. Raises ConfigError, CommandError."""
    from telemetry.slurm.hostlist import expand
    from telemetry.slurm.node_sets import members

    if not node_set.nodes:
        return members(node_set, app.backend.nodes())
    try:
        return tuple(expand(node_set.nodes))
    except ValueError as error:
        raise ConfigError(
            f"node set {node_set.name}: {node_set.nodes!r} is not a hostlist: {error}", "write it as gpu[001-064]"
        ) from error


def show_demand_models(outcomes: list[dict[str, Any]]) -> None:
    for each in outcomes:
        name = f"node set {each['node_set']}"
        if "fault" in each:
            click.echo(printable(f"{name}: not trained: {each['fault']}", 1000), err=True)
            continue
        for alarm in each["drift"]:
            click.echo(printable(f"{name}: drift: {alarm}", 1000))
        click.echo(f"{name}: trained on {day(each['since_s'])} to {day(each['until_s'])}: version {each['version']}")
        for line in each["lines"]:
            click.echo(printable(f"{name}: {line}", 1000))
