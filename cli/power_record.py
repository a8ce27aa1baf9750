"""The record of a node set that `almanac backtest power` replays, from the store or from a file."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.config import Config, NodeSet
from almanac.errors import CommandError, ConfigError, RequestError, StoreError
from almanac.units import DAY_S, format_count, printable
from cli.app import App
from cli.output import progress

if TYPE_CHECKING:
    import numpy as np

    from telemetry.nodes.demand import Accounted
    from telemetry.nodes.runs import NodeRuns
    from telemetry.nodes.series import NodeSeries

RECORD_DAYS = 400
"""Older demand is not read, because it says little about today's."""


@dataclass(frozen=True)
class PowerRecord:
    """unit: what series.counts counts. runs, node_set, nodes: of the store only."""

    name: str
    series: NodeSeries
    unit: str
    runs: NodeRuns | None = None
    node_set: str | None = None
    nodes: int | None = None


def configured(config: Config) -> dict[str, Any]:
    """Values of options that are not given. A price below 0 is not configured."""
    power = config.power
    return {
        "wakeups": power.wakeups_per_day, "shortage": power.short_min_per_day, "boot": power.boot_min,
        "idle_watts": max(0.0, power.idle_watts - power.asleep_watts), "pue": power.pue, "price": config.cost.per_kwh,
        "co2": power.co2_kg_per_kwh, "holidays": power.holidays,
    }  # fmt: skip


def read_file(path: Path, options: dict[str, Any]) -> PowerRecord:
    """Raises click.UsageError, FileFormatError."""
    from telemetry.nodes.series import read_node_series

    if options["set_name"]:
        raise click.UsageError("--node-set selects from the store, but --series names a file: use --vc instead")
    series = read_node_series(path, options["vc"], options["gpus_per_node"])
    return PowerRecord(options["vc"] or path.stem, series, "rows")


def read_store(app: App, options: dict[str, Any]) -> PowerRecord:
    """Raises NotAllowedError, ConfigError, StoreError, RequestError, CommandError, click.UsageError."""
    from telemetry.nodes.counts import with_counts
    from telemetry.nodes.demand import accounted_demand, known_span

    if options["vc"]:
        raise click.UsageError("--vc selects from a file: add --series FILE, or use --node-set instead")
    app.require_operator("a back-test reads all users' jobs")
    node_set = chosen_set(app.config, options["set_name"])
    store = app.cluster_store()
    names = _names(app, node_set)
    known_s = known_span(store)
    if known_s[1] <= known_s[0]:
        raise StoreError(
            f"{store.root}: the store holds no ended job of {store.cluster}",
            "run `almanac ingest`, or give a file of nodes per minute with --series",
        )
    until = parse_time(options["endtime"], "endtime")
    end_s = min(known_s[1], app.now_s())  # a clock that was ahead leaves a watermark in the future
    end_s = end_s if until is None else min(end_s, int(until.astype("int64")))
    start_s = max(known_s[0], end_s - RECORD_DAYS * DAY_S)
    if end_s <= start_s:
        first, last = (dt.datetime.fromtimestamp(second, dt.UTC).isoformat(" ", "minutes")[:16] for second in known_s)
        raise RequestError(f"-E is before the record, which is from {first} to {last}", "give a later -E")
    with progress("record") as advance:
        accounted = accounted_demand(store, node_set, names, start_s, end_s, advance)
    _require_runs(accounted, node_set, names, store.cluster)
    series = with_counts(store, node_set, names, accounted)
    return PowerRecord(f"{store.cluster} {node_set.name}", series, "jobs", accounted.runs, node_set.name, len(names))


def chosen_set(config: Config, name: str) -> NodeSet:
    """The node set of this name, or the only one. Raises ConfigError, click.BadParameter."""
    sets = {one.name: one for one in config.node_sets}
    if not sets:
        raise ConfigError(
            "the configuration names no node set",
            'add a [[node_sets]] table with name = "gpu" and nodes = "gpu[001-064]", or give --series FILE',
        )
    known = ", ".join(sets)
    if name and name not in sets:
        raise click.BadParameter(
            f"there is no node set {printable(name)!r}; choose one of: {known}", param_hint="--node-set"
        )
    if not name and len(sets) > 1:
        raise ConfigError(f"{len(sets)} node sets are configured", f"choose one with --node-set: {known}")
    return sets[name] if name else config.node_sets[0]


def _names(app: App, node_set: NodeSet) -> tuple[str, ...]:
    from cli.train_demand import node_names

    try:
        names = node_names(app, node_set)
    except CommandError as error:
        raise CommandError(
            f"node set {node_set.name}: Slurm did not list its nodes: {error}",
            'run this where slurmctld answers, or select the nodes by name: nodes = "gpu[001-064]"',
        ) from error
    if not names:
        raise ConfigError(f"node set {node_set.name} has no nodes", "correct its nodes, feature, or partition")
    return names


def _require_runs(accounted: Accounted, node_set: NodeSet, names: tuple[str, ...], cluster: str) -> None:
    from telemetry.nodes.demand import NO_NODES

    if len(accounted.runs):
        return
    lacking = accounted.counts.dropped[NO_NODES]
    said = f"; {format_count(lacking)} jobs ran, but have no node list" if lacking else ""
    raise ConfigError(
        f"node set {node_set.name}: none of its {len(names)} nodes ({names[0]}, ...) ran a job of {cluster}{said}",
        "compare its nodes with those of `sacct -a -X -o NodeList`",
    )


@contextmanager
def more_needed(record: PowerRecord) -> Iterator[None]:
    """Tell how to get a longer record if that from the store is too short."""
    try:
        yield
    except RequestError as error:
        if record.runs is None:
            raise
        days = len(record.series) / 1440
        raise RequestError(
            f"{error} (the store holds the demand of {days:.1f} days)",
            f"{error.hint}, or ingest older jobs: `almanac ingest --source sacct -S TIME`",
        ) from error


def parse_time(text: str | None, name: str) -> np.datetime64 | None:
    """A time in UTC, s. Raises click.BadParameter, which names the option."""
    import numpy as np

    if text is None:
        return None
    try:
        when = dt.datetime.fromisoformat(text.strip())
    except ValueError as error:
        said = f"not a time: {printable(text)!r} (expected YYYY-MM-DD[THH:MM[:SS]], in UTC)"
        raise click.BadParameter(said, param_hint=f"--{name.replace('_', '-')}") from error
    return np.datetime64(when.astimezone(dt.UTC).replace(tzinfo=None) if when.tzinfo else when, "s")
