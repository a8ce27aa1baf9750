"""`almanac metrics`: almanac's own metrics, for Prometheus."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.atomic import write_atomically
from almanac.errors import AlmanacError, StoreError
from almanac.exposition import Labels, exposition, family
from almanac.units import DAY_S
from cli.app import App
from reports.self_metrics import collect

if TYPE_CHECKING:
    from prometheus_client import Metric

    from advisor.power.versions import TrainedDemand
    from slurm_hooks.nodes.engine import NodeFolder
    from slurm_hooks.power.nodes import PowerState
    from telemetry.power.demand import NodeUse
    from telemetry.store.store import ClusterStore, Store


FRESH_S = 3600
"""Older counts of nodes are not shown, because they are no longer true."""
STATES = ("total", "active", "wanted", "asleep")


def power_metrics(app: App, store: Store) -> Iterator[Metric]:
    """Yield each power metric that has a value. Raises StoreError."""
    from slurm_hooks.nodes.engine import NodeFolder
    from slurm_hooks.power.nodes import PowerState
    from telemetry.power.demand import load_node_use

    clusters, now_s = store.clusters(), app.now_s()
    uses: dict[Labels, NodeUse] = {
        (("cluster", cluster), ("node_set", name)): use
        for cluster in clusters
        for name, use in load_node_use(store.of(cluster), (now_s - DAY_S, now_s + 1)).items()
    }
    yield from _of_nodes(uses, now_s)
    yield from _of_models({(("cluster", cluster), ("node_set", name)): trained
                           for cluster in clusters for name, trained in _models(store.of(cluster))})  # fmt: skip
    counted = {labels[0][1] for labels in uses}
    yield from _of_runs(NodeFolder(store.root / "power", PowerState), clusters, counted)


def _of_nodes(uses: Mapping[Labels, NodeUse], now_s: int) -> Iterator[Metric]:
    newest = {labels: use.newest for labels, use in uses.items() if use.newest}
    yield family(
        "almanac_power_nodes", "gauge", "Nodes of a node set at the last power run, by state.",
        [((*labels, ("state", state)), getattr(count, state))
         for labels, count in newest.items() if now_s - count.time_s <= FRESH_S for state in STATES],
    )  # fmt: skip
    yield family("almanac_power_run_timestamp_seconds", "gauge", "When the nodes were last counted, by a power run.",
                 [(labels, count.time_s) for labels, count in newest.items()])  # fmt: skip
    for name, about, value in (
        ("wakeups", "Times in the last 24 hours that nodes were woken.", lambda use: len(use.wake_times_s)),
        ("short_minutes", "Minutes of the last 24 hours with fewer nodes on than jobs wanted.",
         lambda use: use.short_min),
        ("asleep_node_hours", "Node-hours asleep in the last 24 hours.", lambda use: use.asleep_hours),
        ("known_share", "Share of the last 24 hours with counts; the other values are of this share.",
         lambda use: use.coverage),
    ):  # fmt: skip
        yield family(f"almanac_power_day_{name}", "gauge", about,
                     [(labels, value(use)) for labels, use in uses.items()])  # fmt: skip


def _models(store: ClusterStore) -> Iterator[tuple[str, TrainedDemand]]:
    """The current model of each node set. `almanac doctor` reports damaged ones."""
    from advisor.power.versions import load_demand, trained_sets

    models_dir = store.models_dir
    for name in trained_sets(models_dir):
        try:
            trained = load_demand(models_dir, name)
        except AlmanacError:
            continue
        if trained:
            yield name, trained


def _of_models(models: Mapping[Labels, TrainedDemand]) -> Iterator[Metric]:
    yield family("almanac_power_model_trained_timestamp_seconds", "gauge", "When the demand model in use was trained.",
                 [(labels, trained.trained_s) for labels, trained in models.items()])  # fmt: skip
    yield family("almanac_power_drift_alarms", "gauge", "Alarms about the forecasts of the week before that training.",
                 [(labels, len(trained.drift)) for labels, trained in models.items()])  # fmt: skip


def _of_runs(folder: NodeFolder[PowerState], clusters: Sequence[str], counted: Collection[str]) -> Iterator[Metric]:
    """The state that the last run saved. An unreadable state is left out: then no run acts, and each run says so.

    counted: clusters whose nodes were counted in the last day. Runs save no state unless power.mode is "apply".
    """
    memories = {}
    for cluster in clusters:
        try:
            memories[cluster] = folder.load(cluster)
        except AlmanacError:
            continue
    memories = {cluster: memory for cluster, memory in memories.items() if memory.run_s}
    yield family(
        "almanac_power_target_nodes", "gauge", "Nodes that the last run wanted on; left out while it holds.",
        [((("cluster", cluster), ("node_set", name)), each.target)
         for cluster, memory in memories.items() for name, each in sorted(memory.sets.items())
         if each.target is not None],
    )  # fmt: skip
    yield family(
        "almanac_power_forecast_nodes", "gauge",
        "Highest number of nodes in use within the next 3 hours, by quantile, as the last run forecast it.",
        [((("cluster", cluster), ("node_set", name), ("quantile", f"{quantile:g}")), nodes)
         for cluster, memory in memories.items() for name, each in sorted(memory.sets.items())
         for quantile, nodes in each.forecast],
    )  # fmt: skip
    yield family(
        "almanac_power_quarantined_nodes", "gauge", "Nodes that did not wake, and were given up.",
        [((("cluster", cluster),), sum(node.quarantined_s is not None for node in memory.nodes.values()))
         for cluster, memory in memories.items()],
    )  # fmt: skip
    yield family(
        "almanac_power_hold", "gauge", "1 while an operator holds the nodes.",
        [((("cluster", cluster),), int(bool(folder.hold_reason()))) for cluster in sorted({*memories, *counted})],
    )  # fmt: skip


READABLE = 0o644
"""node_exporter runs as another user."""


@click.command("metrics")
@click.option(
    "--textfile",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write this .prom file, for the textfile collector of node_exporter. [standard output]",
)
@click.pass_obj
def command(app: App, path: Path | None) -> None:
    """Write almanac's own metrics: reports sent, ingest lag, forecast error, node power, job changes. For operators.

    docs/site-report.md lists them. They name no user and no job.
    """
    app.require_operator("these metrics cover all users' jobs")
    if path and path.suffix != ".prom":
        raise click.BadParameter(
            f"{path} does not end in .prom: node_exporter would not read it", param_hint="--textfile"
        )
    store = app.open_store()
    text = exposition([*collect(store, app.now_s()), *power_metrics(app, store), *_job_metrics(app, store)])
    if not path:
        click.echo(text, nl=False)
        return
    try:
        write_atomically(path, text.encode(), READABLE)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}", "choose a file that you can write") from error


def _job_metrics(app: App, store: Store) -> Iterator[Metric]:
    """Changes of pending jobs, by the lines of their record. An unreadable record is left out: each run says so."""
    from almanac.exposition import family
    from slurm_hooks.jobs.log import PLANNERS, JobLog

    days = {}
    for cluster in store.clusters():
        for name in PLANNERS:
            with contextlib.suppress(StoreError):
                log = JobLog(store.root / "actions", name)
                days[(("cluster", cluster), ("planner", name))] = log.day(cluster, app.now_s())
    yield family(
        "almanac_job_changes_day", "gauge", "Lines of the last 24 hours in the record of changed jobs, by kind.",
        [((*labels, ("what", what)), number) for labels, lines in days.items()
         for what, number in sorted(Counter(line.what for line in lines).items())],
    )  # fmt: skip
    yield family(
        "almanac_job_change_timestamp_seconds", "gauge", "When a job was last changed.",
        [(labels, lines[-1].time_s) for labels, lines in days.items() if lines],
    )  # fmt: skip
