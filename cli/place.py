"""`almanac place`: the GPU type of pending jobs whose owner accepts any type."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import click

from almanac.errors import AlmanacError, ConfigError, StoreError
from cli.app import App
from cli.selection import COUNT

if TYPE_CHECKING:
    from almanac.records import Counts
    from slurm_hooks.placement.log import PlacementLog
    from slurm_hooks.placement.moves import Move
    from slurm_hooks.placement.plan import PlacementPlan
    from slurm_hooks.placement.run import PlacementOutcome
    from telemetry.slurm.command_backend import CommandBackend
    from telemetry.store.cluster_store import ClusterStore

SHOWN = 20
as_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
rows_option = click.option(
    "-n", "--rows", type=COUNT, default=SHOWN, show_default=True, help="Number of changes to show; 0: all."
)


@click.group("place")
def command() -> None:
    """Choose the GPU type of jobs whose owner accepts any (--comment=almanac:any-gpu). For operators, and a timer.

    Only jobs of placement.partitions. Nothing is sent to Slurm unless placement.mode is "apply".
    """


@command.command("plan")
@rows_option
@as_json_option
@click.pass_obj
def plan(app: App, rows: int, as_json: bool) -> None:
    """Show which jobs would get another GPU type now, and why others stay. Writes nothing, sends nothing to Slurm."""
    from cli.place_output import show_run

    store, backend = _site(app)
    made, moves, moving = _plan(app, store, backend)
    _warn_of_types(app, store, backend, made)
    show_run(made, moves, moving, None, rows, as_json)
    _raise_fault(made)


@command.command("apply")
@rows_option
@as_json_option
@click.pass_obj
def apply(app: App, rows: int, as_json: bool) -> int:
    """Change jobs once, and settle what an earlier run left. Run this from a timer; a missed run does no harm.

    Acts only with placement.mode = "apply", as root, SlurmUser, or AdminLevel=Operator; otherwise it only shows the
    plan. Writes each change to actions/ in the store, then sends it to Slurm. A job whose request somebody else changed
    is never touched again.

    \b
    Exit code 4: another run is active, or the record cannot be read or written; Slurm is told nothing.
    Exit code 5: Slurm did not answer, refused changes, or left a job that an operator must look at.
    Exit code 7: the speeds of the GPU types are not known. No job is placed or requeued, but earlier changes are
    settled, and jobs that still wait get their own request back.
    """
    from cli.place_output import show_run

    if not app.config.placement.partitions:
        click.echo("placement.partitions is empty: nothing is planned, and nothing is sent to Slurm", err=True)
        return 0
    store, backend = _site(app)
    if app.config.placement.mode != "apply":
        made, moves, moving = _plan(app, store, backend)
        show_run(made, moves, moving, None, rows, as_json)
        _raise_fault(made)
        return 0
    with one_at_a_time(store):
        made, moves, moving = _plan(app, store, backend)
        outcome = _act(app, store, backend, made, moves)
    show_run(made, moves, moving, outcome, rows, as_json)
    _raise_fault(made)
    return 5 if outcome.failed or outcome.refused else 0


@command.command("undo")
@click.option("--apply", "is_applied", is_flag=True, help="Send the changes to Slurm. [only show them]")
@rows_option
@as_json_option
@click.pass_obj
def undo(app: App, is_applied: bool, rows: int, as_json: bool) -> int:
    """Give placed jobs that still wait their own request back. Works with any placement.mode.

    Exit code 5: Slurm did not answer, or left a job that an operator must look at.
    """
    from cli.place_output import show_run
    from slurm_hooks.placement.plan import plan_placement
    from slurm_hooks.placement.run import read_view
    from slurm_hooks.placement.state import cluster_of

    store, backend = _site(app, needs_settings=False)
    outcome: PlacementOutcome | None = None
    with one_at_a_time(store) if is_applied else contextlib.nullcontext():
        view = read_view(backend, app.commands, store.cluster, time.time)
        history = _log(store).history(store.cluster, app.now_s())
        made = plan_placement(
            cluster_of(view, app.config.placement), history, lambda jobs, types: {}, app.now_s(), is_clearing=True
        )
        if is_applied:
            outcome = _act(app, store, backend, made, ())
    show_run(made, (), None, outcome, rows, as_json)
    return 5 if outcome and outcome.failed else 0


@command.command("status")
@as_json_option
@click.pass_obj
def status(app: App, as_json: bool) -> None:
    """Show the jobs that have a request of almanac's now, the last changes, and the measured requeue delay."""
    from cli.place_output import show_status
    from slurm_hooks.placement.run import read_view
    from slurm_hooks.placement.state import cluster_of

    store, backend = _site(app, needs_settings=False)
    view = read_view(backend, app.commands, store.cluster, time.time)
    log = _log(store)
    history = log.history(store.cluster, app.now_s())
    lines = [line for line in log.read(app.now_s()) if line.cluster == store.cluster]
    show_status(cluster_of(view, app.config.placement), history, lines, app.now_s(), as_json)


def one_at_a_time(store: ClusterStore) -> contextlib.AbstractContextManager[None]:
    """Raises BusyError if another run is active, StoreError if the store is not writable."""
    from telemetry.store.atomic import locked
    from telemetry.store.marks import safe_name

    return locked(store.root / f".place-{safe_name(store.cluster)}.lock", "is placing jobs")


def _site(app: App, needs_settings: bool = True) -> tuple[ClusterStore, CommandBackend]:
    """Raises AlmanacError if the caller, the configuration, the store, or Slurm's release does not allow a plan."""
    from slurm_hooks.placement.run import require_placement
    from telemetry.slurm.command_backend import CommandBackend

    app.require_operator("the queue holds all users' jobs")
    store, backend = app.cluster_store(), CommandBackend(app.commands)
    if (answers := backend.cluster()).lower() != store.cluster.lower():
        raise ConfigError(
            f"the store's cluster is {store.cluster}, Slurm's is {answers}", "correct --cluster or site.cluster"
        )
    if needs_settings:
        require_placement(app.config.placement, backend.release())
    return store, backend


def _warn_of_types(app: App, store: ClusterStore, backend: CommandBackend, made: PlacementPlan) -> None:
    """Of placement.types that Slurm, [[gpu_types]], or the trained speeds do not know; what `made` says is not said
    twice.
    """
    from advisor.artefacts import load_speeds
    from slurm_hooks.placement.type_names import type_faults
    from telemetry.slurm.placement_queue import queue_nodes

    try:
        table = load_speeds(store.models_dir)
    except AlmanacError:
        return  # the plan's fault
    settings, nodes = app.config.placement, queue_nodes(backend.nodes())
    learned = table.names if table is not None else (settings.types if made.fault else None)
    for fault in type_faults(settings, nodes, app.config.gpu_types, learned):
        click.echo(f"warning: {fault.said}\ntry: {fault.todo}", err=True)


def _raise_fault(made: PlacementPlan) -> None:
    """Raises what kept the speeds from being read, after the rest of the run is done."""
    if made.fault is not None:
        raise made.fault


def _log(store: ClusterStore) -> PlacementLog:
    from slurm_hooks.placement.log import PlacementLog

    return PlacementLog(store.root / "actions")


def _plan(
    app: App, store: ClusterStore, backend: CommandBackend
) -> tuple[PlacementPlan, tuple[Move, ...], Counts | None]:
    from almanac.records import Counts
    from slurm_hooks.placement.consent import accepts_any
    from slurm_hooks.placement.moves import plan_moves
    from slurm_hooks.placement.plan import plan_placement
    from slurm_hooks.placement.run import read_terms, read_view
    from slurm_hooks.placement.speeds import no_speeds, speeds_or_fault
    from slurm_hooks.placement.state import cluster_of
    from telemetry.slurm.placement_queue import read_queue

    settings, now_s = app.config.placement, app.now_s()
    history = _log(store).history(store.cluster, now_s)
    jobs, _ = read_queue(app.commands, store.cluster)
    users = {job.gres.user for job in jobs if accepts_any(job.gres.comment)}
    # The history is read before Slurm is: a large one takes longer than such a look may be old.
    speeds = speeds_or_fault(store, app.config, now_s, users) if users else no_speeds
    cluster = cluster_of(read_view(backend, app.commands, store.cluster, time.time), settings)
    try:
        made = plan_placement(cluster, history, speeds, now_s)
        if not settings.requeue or made.fault is not None:
            return made, (), None
        counts, configuration = Counts(), backend.configuration()
        moves = plan_moves(
            cluster, history, speeds, made, lambda job: read_terms(app.commands, job, configuration), now_s, counts
        )
    except ValueError as error:
        raise StoreError(f"no placement was found: {error}", "report this; nothing was changed") from error
    return made, moves, counts


def _act(
    app: App, store: ClusterStore, backend: CommandBackend, made: PlacementPlan, moves: tuple[Move, ...]
) -> PlacementOutcome:
    from slurm_hooks.placement.run import PlacementActor

    actor = PlacementActor(
        app.commands, backend, _log(store), store.cluster, app.config.placement, time.time, time.sleep
    )
    return actor.apply(made, moves)
