"""`almanac reprioritize`, `mig raise`, `place`, and `changes`: one run, one output, one view of what was done."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from almanac.units import counted, format_count, format_duration, printable
from cli.app import COUNT, App
from cli.job_planners import PLANNERS, JobPlanner, PlannerRun
from cli.output import json_text, show_table

if TYPE_CHECKING:
    from almanac.records import Counts
    from slurm.backend import SlurmBackend
    from slurm.queued_job import QueuedJob
    from slurm_hooks.jobs.engine import JobChange, JobOutcome, JobPlan
    from slurm_hooks.jobs.log import ChangeHistory, JobLine, JobLog
    from telemetry.store.store import ClusterStore

SHOWN, SAID = 20, 5


ENDS = {
    "started": "started or left the queue",
    "requeued": "requeued",
    "changed": "left alone: somebody else changed them meanwhile",
    "refused": "as before: Slurm did not take the change",
    "ignored": "as before: Slurm took the change without effect",
    "stopped": "not requeued after all",
    "told": "mailed",
    "cancelled": "cancelled",
}
"""Other outcomes of a change."""


def _acting(app: App, planner: JobPlanner) -> tuple[ClusterStore, SlurmBackend]:
    """Raises AlmanacError if the caller, the store, or Slurm's cluster does not allow a plan."""
    from slurm.backend import CommandBackend

    backend = app.backend if planner.any_backend else CommandBackend(app.commands)
    return app.acting_store(backend, "the queue holds all users' jobs"), backend


def _log(store: ClusterStore, name: str) -> JobLog:
    from slurm_hooks.jobs.log import JobLog

    return JobLog(store.root / "actions", name)


def _run(name: str, app: App, is_applied: bool, is_clearing: bool, rows: int, as_json: bool, hint: str = "") -> int:
    """Plan, change jobs if asked, and show both. Raises AlmanacError, the plan's fault only at the end."""
    plan, outcome = carry_out(PLANNERS[name], app, is_applied, is_clearing)
    if as_json:
        click.echo(json_text(plan_json(plan, outcome)))
    else:
        show_plan(PLANNERS[name], plan, outcome, rows, hint)
    if plan.fault is not None:
        raise plan.fault
    return exit_code(outcome)


def carry_out(
    planner: JobPlanner, app: App, is_applied: bool, is_clearing: bool = False
) -> tuple[JobPlan, JobOutcome | None]:
    """Return the plan, and the outcome of its changes; None without --apply. Raises AlmanacError."""
    from slurm_hooks.jobs.engine import one_at_a_time

    store, backend = _acting(app, planner)
    with one_at_a_time(store, planner.name) if is_applied else contextlib.nullcontext():
        run = PlannerRun(app, backend, _log(store, planner.name), is_applied, is_clearing)
        plan = planner.plan(run)
        return plan, planner.engine(run).apply(plan) if is_applied else None


def exit_code(outcome: JobOutcome | None) -> int:
    return 5 if outcome and (outcome.failed or outcome.refused) else 0


def show_plan(planner: JobPlanner, plan: JobPlan, outcome: JobOutcome | None, rows: int, hint: str) -> None:
    changes = [*plan.changes, *plan.requeues]
    shown = changes[: rows or None]
    if shown:
        show_table([*planner.columns], [_cells(planner, each) for each in shown], right=["now", "new"])
    if len(changes) > len(shown):
        click.echo(f"... and {format_count(len(changes) - len(shown))} more")
    _show_counts(plan.counts, planner.about[0], plan.changes, planner.about[1])
    if plan.fault is not None:
        click.echo("no job is placed: the speeds of the GPU types are not known")
    if plan.running is not None:
        _show_counts(plan.running, "running that may be requeued", plan.requeues, "to requeue")
    if outcome is None:
        click.echo(f"dry run: nothing was sent to Slurm{hint}")
        return
    for what, text in {"waiting": planner.ends[0], "undone": planner.ends[1], **ENDS}.items():
        if number := getattr(outcome, what):
            click.echo(f"{format_count(number)} {text}")
    for line in outcome.said[:SAID]:
        click.echo(f"{planner.says}{printable(line)}", err=True)
    if outcome.failed:
        jobs = ", ".join(outcome.failed[:SAID])
        said = f"error: {counted(len(outcome.failed), 'job')} {planner.failure[0]}: {jobs}"
        click.echo(f"{said}\ntry: {planner.failure[1]}", err=True)


def _show_counts(counts: Counts, what: str, changes: Sequence[JobChange], to_do: str) -> None:
    click.echo(f"{format_count(counts.seen)} {what}, {format_count(len(changes))} {to_do}")
    for reason, number in sorted(counts.dropped.items()):
        click.echo(f"  {format_count(number)} unchanged: {reason}")


def _cells(planner: JobPlanner, each: JobChange) -> list[str]:
    line = each.line
    old, new = (planner.short(line, text) for text in (line.was or "", line.text))
    cells = {
        "job": each.job.address, "user": each.job.user, "what": line.what, "from": old, "to": new, "now": old,
        "new": new, "why": line.reason,
    }  # fmt: skip
    return [printable(cells[name], width) for name, width in planner.columns.items()]


def plan_json(plan: JobPlan, outcome: JobOutcome | None) -> dict[str, Any]:
    return {
        "applied": outcome is not None,
        "pending": plan.counts.seen,
        "changes": [
            {
                "what": each.line.what,
                "job_id": each.job.job_id,
                "user": each.job.user,
                "key": each.line.key,
                "old": _value(each.line, each.line.was),
                "new": _value(each.line, each.line.text),
                "reason": each.line.reason,
            }
            for each in (*plan.changes, *plan.requeues)
        ],
        "left_alone": dict(plan.counts.dropped),
        "not_requeued": dict(plan.running.dropped) if plan.running else {},
        "outcome": vars(outcome) if outcome else None,
        "fault": str(plan.fault) if plan.fault else None,
    }


def _value(line: JobLine, text: str | None) -> str | int | None:
    return int(text) if line.key == "SiteFactor" and text else text


rows_option = click.option(
    "-n", "--rows", type=COUNT, default=SHOWN, show_default=True, help="Number of changes to show; 0: all."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
apply_option = click.option("--apply", "is_applied", is_flag=True, help="Send the changes to Slurm. [only show them]")


def _command(planner: str, name: str, clear: str, about: str) -> click.Command:
    """The command of a planner that shows its changes unless --apply is given. clear: help of --clear."""

    @click.command(name, help=about)
    @apply_option
    @click.option("--clear", "is_clearing", is_flag=True, help=clear)
    @rows_option
    @click.option("--json", "as_json", is_flag=True, help="Print the changes, the counts, and the outcome as JSON.")
    @click.pass_obj
    def command(app: App, is_applied: bool, is_clearing: bool, rows: int, as_json: bool) -> int:
        return _run(planner, app, is_applied, is_clearing, rows, as_json, "; use --apply")

    return command


reprioritize = _command(
    "reprioritize",
    "reprioritize",
    "Reset to 0 the site factors that this command set.",
    """Set the site factor of pending GPU jobs to the model's current prediction. For operators, and a timer.

    Only shows the changes unless you give --apply, which needs priority.mode = "apply", weights in slurm.conf that fit
    (see `almanac doctor`), and root, SlurmUser, or AdminLevel=Operator. Skips jobs whose site factor somebody else set.
    Writes each change to actions/ in the store, then sends it to Slurm. A second run changes nothing.

    Exit code 5: Slurm did not answer, or refused some changes; the next run tries again.
    """,
)
mig_raise = _command(
    "mig-raise",
    "raise",
    "Give raised jobs that still wait their own type back.",
    """Give pending jobs of one MIG slice an idle larger slice that nobody waits for. For operators, and a timer.

    Only jobs whose owner opted in (--comment=almanac:larger), or whose partition is in mig_raise.partitions. A job that
    still waits after 10 minutes gets its own type back. Only shows the changes unless you give --apply, which
    needs mig_raise.mode = "apply", Slurm 24.11 or later, and root, SlurmUser, or AdminLevel=Operator. Writes each
    change to actions/ in the store, then sends it to Slurm.

    Exit code 5: Slurm did not answer, refused changes, or left a job worse off; the next run tries again.
    """,
)


@click.command("place")
@apply_option
@click.option("--clear", "is_clearing", is_flag=True, help="Give placed jobs that still wait their own request back.")
@rows_option
@json_option
@click.pass_obj
def place(app: App, is_applied: bool, is_clearing: bool, rows: int, as_json: bool) -> int:
    """Choose the GPU type of jobs whose owner accepts any (--comment=almanac:any-gpu). For operators, and a timer.

    Only jobs of placement.partitions. Shows which jobs would get another GPU type now, and why others stay. --apply
    changes jobs once, and settles what an earlier run left. It acts only with placement.mode = "apply", as root,
    SlurmUser, or AdminLevel=Operator; --clear --apply works with any mode. Writes each change to actions/ in the store,
    then sends it to Slurm. A job whose request somebody else changed is never touched again.

    \b
    Exit code 4: another run is active, or the record cannot be read or written.
      Nothing is sent to Slurm.
    Exit code 5: Slurm did not answer, refused changes, or left a job that an
      operator must look at.
    Exit code 7: the speeds of the GPU types are not known. No job is placed or
      requeued, but earlier changes are settled, and jobs that still wait get
      their own request back.
    """
    if is_applied and not is_clearing:
        if not app.config.placement.partitions:
            click.echo("placement.partitions is empty: nothing is planned, and nothing is sent to Slurm", err=True)
            return 0
        is_applied = app.config.placement.mode == "apply"
    return _run("place", app, is_applied, is_clearing, rows, as_json)


@click.command("changes")
@rows_option
@json_option
@click.pass_obj
def changes(app: App, rows: int, as_json: bool) -> None:
    """Show which jobs almanac changed in the last day, what became of that, and what waits. For operators.

    By command (reprioritize, mig raise, place, watch), the jobs in the queue with a change and counts of the last day;
    then the newest changes. Reads the lines in actions/ in the store, and the queue.
    """
    from slurm.queue import read_queue
    from slurm_hooks.jobs.log import PLANNERS as RECORDS

    store, _ = _acting(app, PLANNERS["place"])
    jobs, now_s = read_queue(app.commands, store.cluster).jobs, app.now_s()
    logs = {name: _log(store, name) for name in RECORDS}
    days = {name: log.day(store.cluster, now_s) for name, log in logs.items()}
    histories = {name: log.history(store.cluster, now_s) for name, log in logs.items()}
    waiting = {name: _with_change(history, jobs) for name, history in histories.items()}
    placed = histories["place"]
    newest = sorted(((name, line) for name, lines in days.items() for line in lines), key=lambda one: one[1].time_s)
    newest = newest[-rows:] if rows else newest
    if as_json:
        told = {
            name: {
                "in_queue": [{"states": sorted(job.states), **vars(line)} for job, line in found],
                "last_day": Counter(line.what for line in days[name]),
            }
            for name, found in waiting.items()
        }
        last = [{"planner": name, **vars(line)} for name, line in newest]
        click.echo(json_text({"planners": told, "last": last, "requeue_delay_s": placed.requeue_delay_s()}))
        return
    for name, found in waiting.items():
        number_of = Counter(line.what for line in days[name])
        day = ", ".join(f"{format_count(number)} {what}" for what, number in sorted(number_of.items()))
        click.echo(f"{name}: {counted(len(found), 'job')} in the queue with a change; last day: {day or 'nothing'}")
        for job, line in found[: rows or None]:
            states, age = "+".join(sorted(job.states)).lower(), format_duration(max(0, now_s - line.time_s))
            own = printable(line.own, 40) or "nothing"
            click.echo(f"  {job.address}  {states}  {printable(line.new, 40)} for {age}, own: {own}")
    if placed.delays_s:
        click.echo(f"requeue delay: {format_duration(placed.requeue_delay_s())} ({len(placed.delays_s)} measured)")
    if newest:
        cells = [
            (f"{format_duration(max(0, now_s - line.time_s))} ago", name, line.address or str(line.job_id), line.what,
             line.was or "-", line.text or "-", line.reason)
            for name, line in newest
        ]  # fmt: skip
        columns = ("when", "planner", "job", "what", "from", "to", "why")
        show_table(columns, [[printable(cell, 40) for cell in row] for row in cells])


def _with_change(history: ChangeHistory, jobs: Sequence[QueuedJob]) -> list[tuple[QueuedJob, JobLine]]:
    """The jobs that show something of almanac's; the queue does not tell site factors, so the record does."""
    found = []
    for job in jobs:
        line = history.line_of(job)
        if line and (line.what == "set" and job.is_pending if line.key == "SiteFactor" else line.is_shown(job)):
            found.append((job, line))
    return found
