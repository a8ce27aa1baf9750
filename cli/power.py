"""`almanac power`: power nodes down while the forecast does not need them, and up before jobs do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from almanac.errors import AlmanacError, ConfigError, StoreError
from almanac.units import DAY_S, printable
from cli.app import App

if TYPE_CHECKING:
    from almanac.config import Config
    from slurm_hooks.power.folder import PowerFolder
    from slurm_hooks.power.planning import DemandSource, Planner
    from telemetry.store.cluster_store import ClusterStore

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
HISTORY_DAYS, ROWS = 7, 30


@click.group("power")
def command() -> None:
    """Power nodes down and up through Slurm, following the demand forecast. For operators, and a timer.

    almanac powers down only idle nodes of the configured [[node_sets]]. It never ends a job.
    """


@command.command("plan")
@as_json
@click.pass_obj
def plan(app: App, as_json: bool) -> None:
    """Show what `apply` would do now. Writes nothing, and sends nothing to Slurm."""
    from cli.power_output import show_plan

    planner = _planner(app)
    made = planner.plan()
    show_plan(made, None, None, as_json)


@command.command("apply")
@as_json
@click.pass_obj
def apply(app: App, as_json: bool) -> int:
    """Power nodes down and up once. Run this from a timer every 10 minutes; a missed run does no harm.

    Acts only with power.mode = "apply". With "observe", it records demand and logs what it would do. It writes each
    order to power/actions-*.jsonl in the store, then sends it to Slurm. Needs root, SlurmUser, or
    AdminLevel=Administrator.

    \b
    Exit code 4: another run is active, or the store cannot be read or written.
    Exit code 5: Slurm did not answer, or refused orders; the next run tries again.
    """
    from cli.power_output import show_plan
    from slurm_hooks.power.run import PowerRun

    mode = app.config.power.mode
    if mode == "off":
        click.echo('power.mode is "off": nothing is planned, and nothing is sent to Slurm', err=True)
        return 0
    planner = _planner(app)
    with planner.folder.lock():
        run = PowerRun(planner)
        faults = run.note_demand()
        for fault in faults:
            click.echo(printable(f"warning: {fault}", 500), err=True)
        made = planner.plan()
        if mode == "observe":
            run.observe(made)
            show_plan(made, None, mode, as_json)
            return 4 if faults else 0
        outcomes = run.apply(made)
    show_plan(made, outcomes, mode, as_json)
    return 5 if any(each.said for each in outcomes) else 4 if faults else 0


@command.command("status")
@as_json
@click.pass_obj
def status(app: App, as_json: bool) -> None:
    """Show which nodes are powered down, which did not wake, and whether a hold is active."""
    from cli.power_output import show_status
    from slurm_hooks.power.status import status_of

    app.require_operator("node power affects all users")
    _require_node_sets(app.config)
    folder = _folder(app)
    show_status(status_of(app.backend, app.config, folder, _cluster(app), app.now_s()), as_json)


@command.command("history")
@click.option("--days", default=HISTORY_DAYS, show_default=True, type=click.IntRange(1, 3660), help="Days to show.")
@click.option(
    "-n",
    "--rows",
    default=ROWS,
    show_default=True,
    type=click.IntRange(0),
    help="Number of rows to show, the newest; 0: all.",
)
@as_json
@click.pass_obj
def history(app: App, days: int, rows: int, as_json: bool) -> None:
    """Show the orders to Slurm, newest last."""
    from cli.power_output import show_history

    app.require_operator("node power affects all users")
    found = list(_folder(app).log.read(app.now_s() - days * DAY_S, app.now_s()))
    show_history(found[-rows:] if rows else found, len(found), as_json)


@command.command("wake")
@click.argument("nodes", metavar="ALL|NODE_SET|NODES")
@as_json
@click.pass_obj
def wake(app: App, nodes: str, as_json: bool) -> int:
    """Power nodes up now, and end almanac's quarantine of them. ALL also sets a hold, so that they stay on.

    This needs only slurmctld: a broken store, model, configuration, or lock does not stop it. It skips nodes that are
    drained or down for another reason. It waits for nodes that are still powering down.

    Exit code 5: Slurm did not answer, or some nodes were not woken.
    """
    from cli.power_output import show_woken
    from slurm_hooks.power.waking import keep_on, names_to_wake, wake_now

    config, faults = _config_if_any(app)
    backend = _backend(app, config)
    if nodes == "ALL":
        faults += _try(lambda: _folder(app).hold(app.caller, "wake ALL", app.now_s()), "the hold is not set")
    names = names_to_wake(nodes, config, backend.nodes())
    faults += _try(lambda: _note_wake(app, names), "the order is not logged")
    said = keep_on(backend, names) if nodes == "ALL" else []
    woken = wake_now(backend, names)
    show_woken(woken, nodes == "ALL", [*faults, *said], as_json)
    return 5 if woken.said or woken.late or said else 0


@command.command("hold")
@click.option("--off", is_flag=True, help="End the hold.")
@click.option("--why", default="", metavar="TEXT", help="Reason, shown by `status` and in the log.")
@click.pass_obj
def hold(app: App, off: bool, why: str) -> None:
    """Power no node down until `hold --off`. Powered-down nodes still wake when jobs or the warm minimum need them."""
    app.require_operator("node power affects all users")
    folder = _folder(app)
    if off:
        click.echo("hold ended" if folder.release() else "there was no hold")
        return
    folder.hold(app.caller, why or "no reason given", app.now_s())
    click.echo("hold: no node powers down until `almanac power hold --off`")


def _planner(app: App) -> Planner:
    """Raises AlmanacError if the caller, the configuration, or the store does not allow a plan."""
    from slurm_hooks.power.planning import Planner

    app.require_operator("node power affects all users")
    _require_node_sets(app.config)
    store, backend = app.cluster_store(), app.backend
    if (answers := backend.cluster()).lower() != store.cluster.lower():
        raise ConfigError(
            f"the store's cluster is {store.cluster}, Slurm's is {answers}", "correct --cluster or site.cluster"
        )
    return Planner(backend, app.config, _folder(app), store.cluster, source_of(app, store), app.now_s)


def source_of(app: App, store: ClusterStore) -> DemandSource:
    """Where decisions come from."""
    from slurm_hooks.power.source import StoredDemand

    return StoredDemand(store, app.config)


def _require_node_sets(config: Config) -> None:
    if not config.node_sets:
        raise ConfigError("no [[node_sets]] are configured", "name the nodes that may power down (docs/power.md)")


def _cluster(app: App) -> str:
    try:
        return app.cluster_store().cluster
    except StoreError:
        return app.backend.cluster()


def _folder(app: App) -> PowerFolder:
    from slurm_hooks.power.folder import PowerFolder

    return PowerFolder(app.store_root / "power")


def _config_if_any(app: App) -> tuple[Config, list[str]]:
    """The configuration, or the defaults if it is broken: nodes with almanac's reason are known without it."""
    from almanac.config import Config

    try:
        return app.config, []
    except ConfigError as error:
        return Config(), [f"{error}; only nodes with almanac's reason in Slurm are woken"]


def _backend(app: App, config: Config) -> Any:
    if config.source:
        return app.backend
    from telemetry.slurm.command_backend import CommandBackend
    from telemetry.slurm.commands import SlurmCommands

    return CommandBackend(SlurmCommands(timeout_s=60))


def _note_wake(app: App, names: tuple[str, ...]) -> None:
    from almanac import __version__
    from telemetry.slurm.hostlist import fold

    row = {
        "time_s": app.now_s(), "node_set": "", "what": "wake", "nodes": fold(names), "number": len(names),
        "mode": "apply", "reason": f"{app.caller} asked for it", "almanac": __version__,
    }  # fmt: skip
    if names:
        _folder(app).log.append([row], app.now_s())


def _try(action: Any, otherwise: str) -> list[str]:
    """Run an action; return what went wrong, and go on."""
    try:
        action()
    except (AlmanacError, OSError) as error:
        return [printable(f"{otherwise}: {error}", 300)]
    return []
