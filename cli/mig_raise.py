"""`almanac mig raise`: give pending jobs of one MIG slice an idle larger one that nobody waits for."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import ConfigError
from almanac.units import counted, format_count, printable
from cli.app import App
from cli.output import json_text, show_table
from cli.selection import COUNT

if TYPE_CHECKING:
    from slurm_hooks.mig.raise_plan import RaiseOrder, RaisePlan
    from slurm_hooks.mig.raise_run import RaiseOutcome
    from telemetry.store.cluster_store import ClusterStore

SHOWN, SAID = 20, 5
COLUMNS = ("job", "user", "from", "to", "why")
WIDTHS = (12, 10, 12, 12, 26)


@click.command("raise")
@click.option("--apply", "is_applied", is_flag=True, help="Send the changes to Slurm. [only show them]")
@click.option("--clear", "is_clearing", is_flag=True, help="Give raised jobs that still wait their own type back.")
@click.option("-n", "--rows", type=COUNT, default=SHOWN, show_default=True, help="Number of changes to show; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes, the counts, and the outcome as JSON.")
@click.pass_obj
def command(app: App, is_applied: bool, is_clearing: bool, rows: int, as_json: bool) -> int:
    """Give pending jobs of one MIG slice an idle larger slice that nobody waits for. For operators, and a timer.

    Only jobs whose owner opted in (--comment=almanac:larger), or whose partition is in mig_raise.partitions. A job that
    still waits after 10 minutes gets its own type back. Only shows the changes unless you give --apply, which
    needs mig_raise.mode = "apply", Slurm 24.11 or later, and root, SlurmUser, or AdminLevel=Operator. Writes each
    change to actions/ in the store, then sends it to Slurm.

    Exit code 5: Slurm did not answer, refused changes, or left a job worse off; the next run tries again.
    """
    from slurm_hooks.mig.raise_run import require_release
    from telemetry.slurm.command_backend import CommandBackend

    app.require_operator("the queue holds all users' jobs")
    store, backend = app.cluster_store(), CommandBackend(app.commands)
    if (answers := backend.cluster()).lower() != store.cluster.lower():
        raise ConfigError(
            f"the store's cluster is {store.cluster}, Slurm's is {answers}", "correct --cluster or site.cluster"
        )
    require_release(backend.release())
    if is_applied and app.config.mig_raise.mode != "apply" and not is_clearing:
        raise ConfigError(
            f'mig_raise.mode is "{app.config.mig_raise.mode}"', 'set mig_raise.mode = "apply", or leave out --apply'
        )
    with one_at_a_time(store) if is_applied else contextlib.nullcontext():
        made, outcome = _run(app, store, is_applied, is_clearing)
    _show(made, outcome, rows, as_json)
    return 5 if outcome and (outcome.failed or outcome.refused) else 0


def one_at_a_time(store: ClusterStore) -> contextlib.AbstractContextManager[None]:
    """Raises BusyError if another run is active, StoreError if the store is not writable."""
    from telemetry.store.atomic import locked
    from telemetry.store.marks import safe_name

    return locked(store.root / f".mig-raise-{safe_name(store.cluster)}.lock", "is raising jobs")


def _run(app: App, store: ClusterStore, is_applied: bool, is_clearing: bool) -> tuple[RaisePlan, RaiseOutcome | None]:
    from slurm_hooks.mig.raise_log import RaiseLog
    from slurm_hooks.mig.raise_plan import plan_raises
    from slurm_hooks.mig.raise_run import RaiseActor, read_state
    from telemetry.slurm.command_backend import CommandBackend

    log = RaiseLog(store.root / "actions")
    state = read_state(CommandBackend(app.commands), app.commands, store.cluster)
    known = log.newest(store.cluster, app.now_s())
    made = plan_raises(state, known, app.config.mig_raise, app.now_s(), is_clearing)
    if not is_applied:
        return made, None
    return made, RaiseActor(app.commands, log, store.cluster, time.time, time.sleep).apply(made)


def _show(made: RaisePlan, outcome: RaiseOutcome | None, rows: int, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(_as_json(made, outcome)))
        return
    shown = made.orders[: rows or None]
    if shown:
        show_table(COLUMNS, [_cells(order) for order in shown])
    if len(made.orders) > len(shown):
        click.echo(f"... and {format_count(len(made.orders) - len(shown))} more")
    click.echo(f"{format_count(made.counts.seen)} pending, {format_count(len(made.orders))} to change")
    for reason, number in sorted(made.counts.dropped.items()):
        click.echo(f"  {format_count(number)} unchanged: {reason}")
    if outcome is None:
        click.echo("dry run: nothing was sent to Slurm; use --apply")
        return
    _show_outcome(outcome)


def _show_outcome(outcome: RaiseOutcome) -> None:
    ends = {
        "started or left the queue": outcome.gone,
        "raised, and still waiting": outcome.waiting,
        "got their own type back": outcome.undone,
        "kept their own type: Slurm did not take the change": outcome.refused,
    }
    for what, number in ends.items():
        if number:
            click.echo(f"{format_count(number)} {what}")
    for line in outcome.said[:SAID]:
        click.echo(f"Slurm said: {printable(line)}", err=True)
    if outcome.failed:
        jobs = ", ".join(outcome.failed[:SAID])
        said = f"error: {counted(len(outcome.failed), 'job')} cannot run as they are now: {jobs}"
        click.echo(f"{said}\ntry: scontrol show job, then scontrol release", err=True)


def _cells(order: RaiseOrder) -> list[str]:
    """At most 80 columns in all."""
    old, new = order.request.type, order.new_type
    cells = [order.job.address, order.job.user, *((old, new) if order.what == "raise" else (new, old)), order.reason]
    return [printable(cell, width) for cell, width in zip(cells, WIDTHS, strict=True)]


def _as_json(made: RaisePlan, outcome: RaiseOutcome | None) -> dict[str, Any]:
    return {
        "applied": outcome is not None,
        "pending": made.counts.seen,
        "changes": [
            {
                "what": each.what,
                "job_id": each.job.job_id,
                "user": each.job.user,
                "own_type": each.request.type,
                "larger_type": each.new_type,
                "request": f"{each.request.key}={each.text}",
                "reason": each.reason,
            }
            for each in made.orders
        ],
        "left_alone": dict(made.counts.dropped),
        "outcome": vars(outcome) if outcome else None,
    }
