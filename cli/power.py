"""`almanac power`: power nodes down while the forecast does not need them, and up before jobs do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import AlmanacError, CommandError, ConfigError, StoreError
from almanac.units import format_moment, printable
from cli.app import App, CommandGroup
from cli.output import json_text, say, show_record

if TYPE_CHECKING:
    from almanac.actions_config import PowerMode
    from almanac.config import Config
    from slurm.backend import SlurmBackend
    from slurm.node_sets import LiveDemand
    from slurm_hooks.nodes.engine import NodeEngine, NodeFolder
    from slurm_hooks.power.nodes import PowerState
    from slurm_hooks.power.operators import SetStatus, Status, Woken
    from slurm_hooks.power.planning import DemandSource, PowerPlan, PowerPlanner, SetPlan
    from slurm_hooks.power.run import SetOutcome
    from telemetry.store.store import ClusterStore


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
HISTORY_DAYS, ROWS = 7, 30


@click.group("power", cls=CommandGroup)
def command() -> None:
    """Power nodes down and up through Slurm, following the demand forecast. For operators, and a timer.

    almanac powers down only idle nodes of the configured [[node_sets]]. It never ends a job.
    """


@command.command("plan")
@click.option("--apply", "is_applied", is_flag=True, help="Do it once: for a timer, every 10 minutes. [only show it]")
@as_json
@click.pass_obj
def plan(app: App, is_applied: bool, as_json: bool) -> int:
    """Show which nodes would power down and up now, or do it with --apply.

    Without --apply it writes nothing, and sends nothing to Slurm. --apply acts only with power.mode = "apply". With
    "observe", it records demand and logs what it would do. It writes each order to power/actions-*.jsonl in the store,
    then sends it to Slurm. Needs root, SlurmUser, or AdminLevel=Administrator. A missed run does no harm.

    \b
    Exit code 4: another run is active, or the store cannot be read or written.
    Exit code 5: Slurm did not answer, or refused orders.
    """
    from slurm_hooks.power.run import PowerRun

    mode = app.config.power.mode
    if is_applied and mode == "off":
        click.echo('power.mode is "off": nothing is planned, and nothing is sent to Slurm', err=True)
        return 0
    planner = _planner(app)
    if not is_applied:
        show_plan(planner.plan(), None, None, as_json)
        return 0
    with planner.engine.folder.lock():
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
@click.option("--days", default=HISTORY_DAYS, show_default=True, type=click.IntRange(1, 3660), help="Days of orders.")
@as_json
@click.pass_obj
def status(app: App, days: int, as_json: bool) -> None:
    """Show which nodes are powered down, which did not wake, whether a hold is active, and the orders to Slurm."""
    from slurm_hooks.power.operators import status_of

    app.require_operator("node power affects all users")
    _require_node_sets(app.config)
    rows = node_folder(app).rows(days, app.now_s())
    try:
        found = status_of(_engine(app, _cluster(app), app.backend), app.config)
    except CommandError:  # Slurm is down: the record of what almanac told it is asked for most then
        if as_json:
            click.echo(json_text({"orders": rows}))
        else:
            show_record(rows, ROWS)
        raise
    show_status(found, rows, as_json)


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
    from slurm_hooks.power.operators import keep_on, names_to_wake, wake_now

    config, faults = _config_if_any(app)
    backend = _backend(app, config)
    if nodes == "ALL":
        faults += _try(lambda: node_folder(app).hold(app.caller, "wake ALL", app.now_s()), "the hold is not set")
    names = names_to_wake(nodes, config, backend.nodes())
    engine = _engine(app, "", backend)
    if names:
        row = engine.row("wake", names, f"{app.caller} asked for it")
        faults += _try(lambda: engine.record([row]), "the order is not logged")
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
    folder = node_folder(app)
    if off:
        click.echo("hold ended" if folder.release() else "there was no hold")
        return
    folder.hold(app.caller, why or "no reason given", app.now_s())
    click.echo("hold: no node powers down until `almanac power hold --off`")


def _planner(app: App) -> PowerPlanner:
    """Raises AlmanacError if the caller, the configuration, or the store does not allow a plan."""
    from slurm_hooks.power.planning import PowerPlanner

    app.require_operator("node power affects all users")
    _require_node_sets(app.config)
    try:
        store = app.acting_store(app.backend, "node power affects all users")
    except CommandError as error:
        if app.config.site.cluster != "demo":
            raise
        hint = "the site of `almanac demo` has no Slurm: `almanac backtest power` replays its record"
        raise CommandError(str(error), hint) from error
    return PowerPlanner(_engine(app, store.cluster, app.backend), app.config, source_of(app, store))


def source_of(app: App, store: ClusterStore) -> DemandSource:
    """Source of the demand for decisions."""
    from slurm_hooks.power.planning import StoredDemand

    return StoredDemand(store, app.config)


def _require_node_sets(config: Config) -> None:
    if not config.node_sets:
        raise ConfigError("no [[node_sets]] are configured", "name the nodes that may power down (docs/power.md)")


def _cluster(app: App) -> str:
    try:
        return app.cluster
    except StoreError:
        return app.backend.cluster()


def node_folder(app: App) -> NodeFolder[PowerState]:
    """The folder of power control in the store."""
    from slurm_hooks.nodes.engine import NodeFolder
    from slurm_hooks.power.nodes import PowerState

    return NodeFolder(app.store_root / "power", PowerState)


def _engine(app: App, cluster: str, backend: SlurmBackend) -> NodeEngine[PowerState]:
    from slurm_hooks.nodes.engine import NodeEngine

    return NodeEngine(node_folder(app), backend, cluster, app.now_s)


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
    from slurm.backend import CommandBackend
    from slurm.commands import SlurmCommands

    return CommandBackend(SlurmCommands(timeout_s=60))


def _try(action: Any, otherwise: str) -> list[str]:
    """Run an action; return what went wrong, and go on."""
    try:
        action()
    except (AlmanacError, OSError) as error:
        return [printable(f"{otherwise}: {error}", 300)]
    return []


MOST_NAMES = 200
_STAY = "in use, reserved, excluded, cooling down, out of power cycles, warm minimum, or above 20 in a run"


def show_plan(plan: PowerPlan, outcomes: Sequence[SetOutcome] | None, mode: PowerMode | None, as_json: bool) -> None:
    """Print a plan, or the outcome of a run."""
    if as_json:
        click.echo(json_text(_plan_json(plan, outcomes)))
        return
    for place, each in enumerate(plan.sets):
        say(0, f"{each.node_set}: {_counts(each.demand, each.powered)}")
        say(2, _target(each))
        if each.forecaster:
            say(2, f"forecast: {each.forecaster}")
        for what, names in each.orders().items():
            say(2, f"{_WORDS.get(what, what)} {len(names)}: {_hosts(names)}")
        if each.target is not None and (more := each.powered - each.target - len(each.chosen.power_down)) > 0:
            say(2, f"{more} more stay on ({_STAY})")
        if each.chosen.short:
            say(2, f"{each.chosen.short} nodes too few: almanac has no other node to wake")
        if each.failures.later:
            say(2, f"did not wake for lack of cloud capacity, tried again later: {_hosts(each.failures.later)}")
        if each.quarantined:
            say(2, f"did not wake, drained until an operator repairs them: {_hosts(each.quarantined)}")
        if outcomes:
            _show_outcome(outcomes[place])
    if outcomes is None:
        why = {"observe": ' (power.mode is "observe")', None: " (this is a plan)"}.get(mode, "")
        say(0, f"nothing was sent to Slurm{why}")


def _show_outcome(outcome: SetOutcome) -> None:
    if outcome.changed:
        say(2, f"left on, because no longer idle, or held: {_hosts(outcome.changed)}")
    if outcome.unheard:
        say(2, f"Slurm dropped the order; the next run repeats it: {_hosts(outcome.unheard)}")
    for line in dict.fromkeys(outcome.said):
        click.echo(f"Slurm said: {printable(line)}", err=True)


_WORDS = {
    "quarantine": "quarantine, did not wake:", "power down again": "power down again, slurmctld forgot:",
    "resume": "resume, up again:",
}  # fmt: skip


def _target(each: SetPlan) -> str:
    if each.target is None:
        return f"no change: {each.reason}"
    return f"target {each.target} nodes: {each.reason}"


def _counts(demand: LiveDemand, powered: int | None = None) -> str:
    on = "" if powered is None else f", {powered} on"
    return f"{demand.total} nodes: {demand.active} in use, {demand.wanted} wanted, {demand.asleep} asleep{on}"


def _plan_json(plan: PowerPlan, outcomes: Sequence[SetOutcome] | None) -> dict[str, Any]:
    sets = []
    for place, each in enumerate(plan.sets):
        row: dict[str, Any] = {
            "node_set": each.node_set, **asdict(each.demand), "powered": each.powered, "target": each.target,
            "reason": each.reason, "hold": each.target is None, "wake": each.chosen.wake,
            "power_down": each.chosen.power_down, "short": each.chosen.short, "wake_again": each.failures.again,
            "wake_later": each.failures.later, "forecaster": each.forecaster,
            "resume": each.failures.back, "quarantine": each.failures.give_up,
            "power_down_again": each.failures.lost, "quarantined": each.quarantined,
        }  # fmt: skip
        if outcomes:
            row |= {
                "said": outcomes[place].said,
                "left_on": outcomes[place].changed,
                "unheard": outcomes[place].unheard,
            }
        sets.append(row)
    return {"applied": outcomes is not None, "time_s": plan.now_s, "actuator": plan.actuator, "node_sets": sets}


def show_status(status: Status, rows: Sequence[Mapping[str, Any]], as_json: bool) -> None:
    """Print the state of the nodes, and the newest orders. rows: all orders, for --json."""
    if as_json:
        click.echo(json_text({**asdict(status), "orders": list(rows)}))
        return
    if status.hold:
        say(0, f"{status.hold}; no node powers down until `almanac power hold --off`")
    if status.fault:
        say(0, f"no node powers down: {status.fault}")
    if status.mode != "apply":
        say(0, f'power.mode is "{status.mode}": nothing is sent to Slurm')
    say(0, f"last run: {format_moment(status.run_s) if status.run_s else 'none yet'}")
    for each in status.sets:
        _show_set(each)
    show_record(rows, ROWS)


def _show_set(each: SetStatus) -> None:
    say(0, f"{each.node_set}: {_counts(each.demand)}")
    for name, reason in each.did_not_wake:
        say(2, f"{name}: {reason}; repair it, then `almanac power wake {name}`")
    if each.asleep:
        say(2, f"asleep: {_hosts(each.asleep)}")
    if each.asleep_by_others:
        say(2, f"asleep, but not powered down by almanac, so left alone: {_hosts(each.asleep_by_others)}")
    say(2, f"last 24 h: {each.wakes} wake-ups of {each.boots} nodes, {each.cycles} node power-downs")


def show_woken(woken: Woken, is_held: bool, faults: Sequence[str], as_json: bool) -> None:
    if as_json:
        click.echo(json_text({**asdict(woken), "faults": list(faults)}))
        return
    say(0, f"powering up {len(woken.woken)} nodes" + (f": {_hosts(woken.woken)}" if woken.woken else ""))
    if woken.undrained:
        say(0, f"quarantine ended: {_hosts(woken.undrained)}")
    if woken.late:
        say(0, f"still powering down; run this again later: {_hosts(woken.late)}")
    if woken.left:
        say(0, f"skipped, because unknown, or drained or down for another reason: {_hosts(woken.left)}")
    if is_held:
        say(0, "hold: no node powers down until `almanac power hold --off`")
    for line in (*faults, *dict.fromkeys(woken.said)):
        click.echo(f"warning: {printable(line, 300)}", err=True)


def _hosts(names: Sequence[str]) -> str:
    """A host list, cut if it is long."""
    from slurm.hostlist import fold

    text = fold(names)
    return text if len(text) <= MOST_NAMES else f"{text[:MOST_NAMES]}... (--json has all)"
