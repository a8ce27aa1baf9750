"""`almanac watch`: running jobs that idle, hang, or are about to fail, and what is done about them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from almanac.units import counted, format_count, format_duration, format_job_id, printable
from cli.app import COUNT, App, folded
from cli.job_changes import carry_out, exit_code, plan_json, show_plan
from cli.job_planners import steps_taken, watch_planner
from cli.output import json_text

if TYPE_CHECKING:
    from advisor.watch.round import Round, WatchFinding


@click.command("watch")
@click.option("--apply", "is_applied", is_flag=True, help="Keep what was seen, and do what [watch] says.")
@click.option("-n", "--rows", type=COUNT, default=20, show_default=True, help="Most findings to list; 0 for all.")
@click.option("--json", "as_json", is_flag=True, help="Print the round as JSON.")
@click.pass_obj
def command(app: App, is_applied: bool, rows: int, as_json: bool) -> int:
    """Find running jobs that idle, hang, or are about to fail. For operators, and a timer.

    Reads Slurm's running jobs and the newest minutes of their GPUs' counters. How long something lasts is known from
    the rounds before: the task `watch` of `almanac run` makes one every 2 minutes. Without --apply nothing is kept and
    nothing is done; with it, only what the lists of [watch] name.
    """
    app.require_operator("running jobs are all users'")
    # Late: loads Arrow and the store.
    from advisor.watch.live import LiveWatch
    from almanac.published.outgoing import outgoing_of, uid_of
    from reports.published.live import live_jobs, publish_live

    watch = LiveWatch(app)
    is_first = not watch.state.at_s
    round_, findings = watch.look()
    if is_applied:
        watch.save()
        folder = outgoing_of(app.store.root, app.cluster)
        publish_live(folder, app.cluster, round_.at_s, live_jobs(round_, findings, steps_taken(app)), uid_of)
    settings = app.config.watch
    planner = watch_planner(round_, findings, watch.look)
    # Slurm is asked for nothing more where nothing may be done.
    acts = bool(settings.message or settings.operators or settings.cancel)
    plan, outcome = carry_out(planner, app, is_applied) if acts else (None, None)
    if as_json:
        done = plan_json(plan, outcome) if plan else None
        click.echo(json_text({**_as_json(round_, findings), "notes": list(watch.notes), "actions": done}))
        return exit_code(outcome)
    _show(round_, findings, rows)
    for note in watch.notes:
        click.echo(f"warning: {printable(note, 300)}", err=True)
    if is_first:
        click.echo("this is the first round: what lasts is found in later ones (task watch in tasks.toml)")
    if plan:
        show_plan(planner, plan, outcome, rows, "; use --apply")
    else:
        click.echo("nobody is told, and nothing is done: the lists of [watch] are empty")
    return exit_code(outcome)


def _show(round_: Round, findings: Sequence[WatchFinding], rows: int) -> None:
    jobs = {row["job_id"]: row for row in round_.jobs.to_pylist()} if findings else {}
    for each in findings[: rows or None]:
        job = jobs[each.job_id]
        lasted = format_duration(each.until_s - each.since_s) if each.until_s > each.since_s else "now"
        doubt = ", a counter is suspect" if each.is_suspect else ""
        click.echo(
            f"{format_job_id(job)}  {printable(job['user'], 20)}  {printable(job['partition'], 20)}  "
            f"{each.kind.replace('_', ' ')}, {lasted}, {each.coverage:.0%} seen{doubt}"
        )
        click.echo(f"  {folded(printable(each.says, 400), sys.stdout, '  ')}")
    if rows and len(findings) > rows:
        click.echo(f"... and {format_count(len(findings) - rows)} more")
    kinds = Counter(each.kind for each in findings)
    click.echo(f"{counted(len(round_.jobs), 'running GPU job')}, {format_count(round_.seen_jobs)} with counters now")
    if round_.unknown:
        click.echo(f"counters are unknown, so nothing is judged by them: {printable(round_.unknown, 200)}")
    click.echo(
        "found: " + (", ".join(f"{format_count(n)} {kind.replace('_', ' ')}" for kind, n in kinds.items()) or "nothing")
    )


def _as_json(round_: Round, findings: Sequence[WatchFinding]) -> dict[str, Any]:
    """Findings of schema 1; docs/watch.md lists the fields."""
    return {
        "schema": 1, "at_s": round_.at_s, "span_s": round_.span_s, "unknown": round_.unknown,
        "jobs": len(round_.jobs), "jobs_with_counters": round_.seen_jobs,
        "findings": [asdict(each) for each in findings],
    }  # fmt: skip
