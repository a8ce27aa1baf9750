"""`almanac doctor`: the demand models of the node sets, and whether power runs happen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from almanac.config import NodeSet
from almanac.units import DAY_S, format_duration
from cli.app import App
from cli.doctor.findings import Check

if TYPE_CHECKING:
    from telemetry.nodes.use import NodeUse
    from telemetry.store.cluster_store import ClusterStore

LATE_S = 3600
"""Six power runs that did not happen."""


def check_demand(app: App) -> Iterator[Check]:
    """Yields nothing without node sets, or with power.mode = "off"."""
    if app.config.power.mode == "off" or not app.config.node_sets:
        return
    from advisor.demand.lifecycle import WINDOW_DAYS
    from telemetry.nodes.use import load_node_use

    if not app.open_store().clusters():
        return
    store, now_s = app.cluster_store(), app.now_s()
    uses = load_node_use(store, (now_s - WINDOW_DAYS * DAY_S, now_s))
    for node_set in app.config.node_sets:
        yield _check_model(app, store, node_set, uses.get(node_set.name))
        yield _check_runs(node_set.name, uses.get(node_set.name), now_s)
    yield from _check_removed(app, store)


def _check_model(app: App, store: ClusterStore, node_set: NodeSet, use: NodeUse | None) -> Check:
    from advisor.demand.lifecycle import budget_alarms, usable_demand

    name = f"demand of {node_set.name}"
    trained, why = usable_demand(store.models_dir, node_set, app.config, app.now_s())
    if trained is None:
        return Check(name, "warn", f"no node is powered down: {why}", "run `almanac train` on a timer")
    age = format_duration(max(0, app.now_s() - trained.trained_s))
    said = f"trained {age} ago on {(trained.until_s - trained.since_s) / DAY_S:.0f} days"
    alarms = [*trained.drift, *(budget_alarms(use, app.config.power) if use else ())]
    if alarms:
        todo = "see `almanac power history` for what changed; a smaller budget keeps more nodes on"
        return Check(name, "warn", f"{said}; {'; '.join(dict.fromkeys(alarms))}", todo)
    return Check(name, "ok", said)


def _check_runs(name: str, use: NodeUse | None, now_s: int) -> Check:
    from advisor.demand.lifecycle import WINDOW_DAYS

    name = f"power runs of {name}"
    if use is None or use.newest is None:
        return Check(name, "warn", f"none in the last {WINDOW_DAYS} days", "add the task power on the controller")
    age_s = max(0, now_s - use.newest.time_s)
    said = f"nodes counted {format_duration(age_s)} ago"
    return Check(name, "warn", said, "see `almanac run --list`") if age_s > LATE_S else Check(name, "ok", said)


def _check_removed(app: App, store: ClusterStore) -> Iterator[Check]:
    """Models of node sets that were renamed or removed."""
    from advisor.demand.versions import trained_sets

    models_dir = store.models_dir
    gone = sorted({*trained_sets(models_dir)} - {node_set.name for node_set in app.config.node_sets})
    if gone:
        said = f"models exist for node sets that are not configured: {', '.join(gone)}"
        yield Check(
            "demand models", "warn", said, f"give the set its old name, or remove its folder from {models_dir}/demand"
        )
