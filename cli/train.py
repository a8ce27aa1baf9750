"""`almanac train`: train the predictors on the jobs in the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from almanac.errors import BusyError
from almanac.units import format_count, printable
from cli.app import App
from cli.output import json_text, progress
from cli.scores import scores_table, show_scores
from cli.train_demand import show_demand_models, train_demand_models

if TYPE_CHECKING:
    import pandas as pd

    from advisor.service import Trained
    from advisor.speed.learning import SpeedTable

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
    from advisor.artefacts import load, load_learned, save
    from advisor.duration.baselines import OURS
    from advisor.lifecycle import faults_of
    from advisor.service import BUILT_IN, train
    from advisor.services.base import Record
    from advisor.services.own import update_own
    from advisor.speed.runs import load_speed_runs
    from advisor.version_folders import KEEP_VERSIONS
    from advisor.versions import prune
    from simulator.rank_choice import choose_exponent
    from telemetry.history import load_history

    app.require_operator("training reads all users' jobs")
    store = app.cluster_store()
    forgotten = store.forgotten()
    history = load_history(store, running=True)
    record = Record(store, history, app.now_s())
    previous = _of_current(load, store.models_dir)
    drift = _drift(app, previous, history)
    with progress("train") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        trained = train(history, app.config, record.now_s, previous, choose_exponent, load_speed_runs(store))
        own = update_own(record, _of_current(load_learned, store.models_dir) or {}, app.config)
    if store.forgotten() != forgotten:
        raise BusyError("a user was forgotten while this training ran: it is not kept", "run `almanac train` again")
    version = save(trained, store.models_dir, own.learned)
    prune(store.models_dir, KEEP_VERSIONS, version)
    demand = train_demand_models(app, store)
    app.look_for_damage()
    speeds = trained.speeds
    faults = faults_of(trained, app.config, app.now_s())
    services = [*BUILT_IN, *own.names]
    if as_json:
        click.echo(json_text({"version": version, "jobs": trained.jobs, "has_model": trained.model is not None,
                              "rank_exponent": trained.model.rank_scale.exponent if trained.model else None,
                              "scores": scores_table(trained.scores), "drift": drift, "faults": faults,
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
    click.echo(f"the queue ranks by GPUs x predicted time^{trained.model.rank_scale.exponent:g}, as simulated")
    show_scores("duration predicted by", trained.scores, OURS)


def _families(speeds: SpeedTable) -> str:
    """The types, each with the number of its families that ran on another type, too."""
    counts = [f"{name} ({format_count(speeds.families.get(name, 0))} families)" for name in speeds.names]
    return printable(", ".join(counts), 1000)


def _of_current(load: Callable[[Path], Loaded], models_dir: Path) -> Loaded | None:
    """Load from the version in use; None if it cannot be read, because the new version replaces it anyway."""
    from almanac.errors import AlmanacError

    try:
        return load(models_dir)
    except AlmanacError:
        return None


def _drift(app: App, trained: Trained | None, history: pd.DataFrame) -> list[str]:
    """Alarms about the version in use before this training."""
    from advisor.lifecycle import drift_of

    drift = drift_of(trained, history, app.config, app.now_s()) if trained else None
    return list(drift.alarms) if drift else []
