"""What `almanac place` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from almanac.units import counted, format_count, format_duration, printable
from cli.output import json_text, show_table

if TYPE_CHECKING:
    from almanac.records import Counts
    from slurm_hooks.placement.log import PlacementHistory, PlacementLine
    from slurm_hooks.placement.moves import Move
    from slurm_hooks.placement.plan import Order, PlacementPlan
    from slurm_hooks.placement.run import PlacementOutcome
    from slurm_hooks.placement.state import Cluster

SAID = 5
COLUMNS = ("job", "user", "what", "from", "to", "why")
WIDTHS = (10, 10, 7, 15, 15, 30)


def show_run(
    made: PlacementPlan,
    moves: Sequence[Move],
    moving: Counts | None,
    outcome: PlacementOutcome | None,
    rows: int,
    as_json: bool,
) -> None:
    """moving: running jobs of owners who allow a requeue; None where no requeue was looked for."""
    if as_json:
        click.echo(json_text(_as_json(made, moves, moving, outcome)))
        return
    cells = [*map(_order_cells, made.orders), *map(_move_cells, moves)]
    shown = cells[: rows or None]
    if shown:
        show_table(COLUMNS, shown)
    if len(cells) > len(shown):
        click.echo(f"... and {format_count(len(cells) - len(shown))} more")
    click.echo(f"{format_count(made.counts.seen)} pending, {format_count(len(made.orders))} to change")
    _show_counts(made.counts)
    if made.fault is not None:
        click.echo("no job is placed: the speeds of the GPU types are not known")
    if moving is not None:
        click.echo(f"{format_count(moving.seen)} running that may be requeued, {format_count(len(moves))} to requeue")
        _show_counts(moving)
    if outcome is None:
        click.echo("dry run: nothing was sent to Slurm")
        return
    _show_outcome(outcome)


def _show_counts(counts: Counts) -> None:
    for reason, number in sorted(counts.dropped.items()):
        click.echo(f"  {format_count(number)} unchanged: {reason}")


def _show_outcome(outcome: PlacementOutcome) -> None:
    ends = {
        "placed, and still waiting": outcome.placed,
        "started or left the queue": outcome.started,
        "got their own request back": outcome.undone,
        "requeued": outcome.requeued,
        "left alone: somebody else changed them meanwhile": outcome.changed,
        "kept their request: Slurm did not take the change": outcome.refused,
        "not requeued after all": outcome.stopped,
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


def show_status(
    cluster: Cluster, history: PlacementHistory, lines: Sequence[PlacementLine], now_s: int, as_json: bool
) -> None:
    """Jobs in the queue with a request of almanac's, and the newest lines."""
    from slurm_hooks.placement.plan import is_placed, line_of, type_now

    placed = [(job, line) for job in cluster.view.jobs if (line := line_of(job, history)) and is_placed(job, line)]
    delay_s = history.requeue_delay_s()
    if as_json:
        shown = [{"job_id": job.job_id, "states": sorted(job.states), **vars(line)} for job, line in placed]
        click.echo(json_text({"placed": shown, "last": [vars(line) for line in lines[-20:]], "delay_s": delay_s}))
        return
    for job, line in placed:
        age = format_duration(max(0, now_s - line.time_s))
        own = printable(line.own, 40) or "no constraint"
        states, kind = "+".join(sorted(job.states)).lower(), type_now(job, line, cluster)
        click.echo(f"{job.job_id}  {states}  on {kind} for {age}, own: {own}")
    pools = ", ".join(f"{name} {pool.free} of {pool.total} free" for name, pool in cluster.pools.items())
    click.echo(f"{counted(len(placed), 'job')} with a request of almanac's; GPUs: {pools or 'none in service'}")
    click.echo(f"requeue delay: {format_duration(delay_s)} ({len(history.delays_s)} measured)")
    for line in lines[-5:]:
        age = format_duration(max(0, now_s - line.time_s))
        click.echo(f"{age} ago  {line.what} {line.job_id}: {printable(line.reason, 60)}")


def _order_cells(order: Order) -> list[str]:
    """At most 100 columns in all."""
    cells = [
        str(order.job.job_id),
        order.job.gres.user,
        order.what,
        order.shown or "-",
        order.text or "-",
        order.reason,
    ]
    return [printable(cell, width) for cell, width in zip(cells, WIDTHS, strict=True)]


def _move_cells(move: Move) -> list[str]:
    cells = [str(move.job.job_id), move.job.gres.user, "requeue", move.old_type, move.gpu_type, move.reason]
    return [printable(cell, width) for cell, width in zip(cells, WIDTHS, strict=True)]


def _as_json(
    made: PlacementPlan, moves: Sequence[Move], moving: Counts | None, outcome: PlacementOutcome | None
) -> dict[str, Any]:
    return {
        "applied": outcome is not None,
        "pending": made.counts.seen,
        "changes": [
            {
                "what": each.what,
                "job_id": each.job.job_id,
                "user": each.job.gres.user,
                "gpu_type": each.gpu_type,
                "old": each.shown,
                "new": each.text,
                "reason": each.reason,
            }
            for each in made.orders
        ],
        "requeues": [
            {"job_id": each.job.job_id, "from": each.old_type, "to": each.gpu_type, "gain_s": each.gain_s,
             "cost_s": each.cost_s}
            for each in moves
        ],
        "left_alone": dict(made.counts.dropped),
        "not_requeued": dict(moving.dropped) if moving else {},
        "outcome": vars(outcome) if outcome else None,
        "fault": str(made.fault) if made.fault else None,
    }  # fmt: skip
