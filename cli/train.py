"""`almanac train`: train the predictors, and the demand models of the node sets, on the jobs in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from advisor.artefacts import load, load_learned, prune, save
from advisor.duration.rank import rank_words
from advisor.from_store import drift_of, faults_of
from advisor.power.lifecycle import train_node_set
from advisor.service import BUILT_IN, SiteRecord, train, update_own
from advisor.types.runs import load_speed_runs
from advisor.types.times import learn_site_speeds
from advisor.version_folders import KEEP_VERSIONS
from almanac.errors import AlmanacError, BusyError
from almanac.units import format_count, json_value, printable
from cli.app import App
from cli.backtest import duration_table
from cli.models import day, node_names
from cli.output import json_text, progress
from simulator.rank_choice import choose_rank
from simulator.trial import site_backfill
from slurm.commands import slurm_settings
from telemetry.history import load_history, load_host_history
from telemetry.store.database import check_files

if TYPE_CHECKING:
    import pandas as pd

    from advisor.service import Trained
    from advisor.types.learning import SpeedTable


def train_demand_models(app: App) -> list[dict[str, Any]]:
    """Train each node set: fields of DemandTraining, or its name and a fault. A fault does not stop the other sets."""
    if app.config.power.mode == "off":
        return []
    found: list[dict[str, Any]] = []
    with progress("demand") as advance:
        for number, node_set in enumerate(app.config.node_sets):
            advance(number, len(app.config.node_sets), node_set.name)
            try:
                found.append(asdict(train_node_set(app, node_set, node_names(app, node_set))))
            except AlmanacError as error:
                found.append({"node_set": node_set.name, "fault": f"{error}; {error.hint}"})
    return found


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


def _has_backfill(app: App) -> bool:
    """False if slurm.conf rules backfill out; True if Slurm does not answer."""
    try:
        return bool(site_backfill(slurm_settings(app.commands))[0])
    except AlmanacError:
        return True


Loaded = TypeVar("Loaded")


@click.command("train")
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.pass_obj
def command(app: App, as_json: bool) -> None:
    """Train the predictors of job duration, memory, and node demand, and print their scores. For operators.

    The scores compare the models with simple baselines, on jobs that the models had not seen: the jobs that ended since
    earlier trainings. The first training holds back the newest share of the jobs for this.

    It then compares the store's files with their checksums, and names damaged ones.
    """
    app.require_operator("training reads all users' jobs")
    store = app.store
    forgotten = store.forgotten()
    history = load_history(store, running=True)
    record = SiteRecord(store, history, app.now_s())
    previous = _of_current(load, store.models_dir)
    drift = _drift(app, previous, history)
    with progress("train") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        choose = partial(choose_rank, priority=app.config.priority, has_backfill=_has_backfill(app))
        trained = train(history, app.config, record.now_s, previous, choose, load_host_history(store))
        speeds = learn_site_speeds(load_speed_runs(store), app.config, record.now_s)
        own = update_own(record, _of_current(load_learned, store.models_dir) or {}, app.config)
    if store.forgotten() != forgotten:
        raise BusyError("a user was forgotten while this training ran: it is not kept", "run `almanac train` again")
    version = save(trained, store.models_dir, own.learned, speeds)
    prune(store.models_dir, KEEP_VERSIONS, version)
    demand = train_demand_models(app)
    opened = app.open_store()
    opened.report_strays(check_files(opened.root).damaged)
    faults = faults_of(trained, app.now_s())
    services = [*BUILT_IN, *own.names]
    if as_json:
        click.echo(json_text({"version": version, "jobs": trained.jobs, "has_model": trained.model is not None,
                              "rank": json_value(trained.rank),
                              "scores": json_value(trained.scores), "drift": drift, "faults": faults,
                              "gpu_types": {name: speeds.families.get(name, 0) for name in speeds.names},
                              "services": services, "service_faults": dict(own.faults), "demand": demand}))  # fmt: skip
        return
    for alarm in drift:
        click.echo(f"drift: {alarm}")
    click.echo(f"trained on {format_count(trained.jobs)} GPU jobs of {store.cluster}: version {version}")
    click.echo(f"services updated: {printable(', '.join(services), 1000)}")
    for name, fault in own.faults.items():
        click.echo(printable(f"service {name}: {fault}", 1000), err=True)
    for fault in faults:
        click.echo(f"the new duration model is not used: {fault}")
    show_demand_models(demand)
    if len(speeds.names) > 1:
        click.echo(f"speeds of GPU types: {_families(speeds)}")
    if trained.model is None:
        click.echo(
            f"no duration model: fewer than {app.config.training.min_jobs} jobs. Each user's last runs are used."
        )
        return
    click.echo(f"order of the queue: {rank_words(trained.rank)}")
    if trained.scores:
        duration_table("duration predicted by", trained.scores).show()


def _families(speeds: SpeedTable) -> str:
    """The types, each with the number of its families that ran on another type, too."""
    counts = [f"{name} ({format_count(speeds.families.get(name, 0))} families)" for name in speeds.names]
    return printable(", ".join(counts), 1000)


def _of_current(load: Callable[[Path], Loaded], models_dir: Path) -> Loaded | None:
    """Load from the version in use; None if it cannot be read, because the new version replaces it anyway."""
    try:
        return load(models_dir)
    except AlmanacError:
        return None


def _drift(app: App, trained: Trained | None, history: pd.DataFrame) -> list[str]:
    """Alarms about the version in use before this training."""
    drift = drift_of(trained, history, app.now_s()) if trained else None
    return list(drift.alarms) if drift else []
