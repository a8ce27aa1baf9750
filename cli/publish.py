"""`almanac publish`: the advice files that Slurm's hooks read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.errors import AlmanacError
from almanac.units import format_count, printable
from cli.app import App
from cli.output import json_text
from cli.root_part import hand_out, leave_root

if TYPE_CHECKING:
    from reports.published.publish import OwnPublished
    from slurm_hooks.advice.publish import Published, PublishRun

_NAMED = 10
"""Users named in the summary; JSON names all."""


@click.command("publish")
@click.option("--dry-run", is_flag=True, help="Write nothing; show what would change.")
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@click.pass_obj
def command(app: App, dry_run: bool, as_json: bool) -> None:
    """Compute the advice files that job_submit and sbatch read, one per user and one for everybody else.

    Also written: each user's run times by GPU type, for sites with several types (see `almanac waits`).

    Then write the reports of each user's newest jobs, which only that user can read. [reports] sets how many.

    Only files with changed content are replaced, each as a whole. Every file is renewed after half of
    48 hours. The files wait in the store until root's program `almanac-distribute` gives them to their
    readers; run as root, this command also does that, after it has done the rest as the store's owner.

    With priority.mode = "apply", site factors are applied only if Slurm's weights fit. The store
    keeps what was published.
    """
    app.require_operator("advice is published for everybody")

    target = Path(app.config.hooks.advice_dir).absolute()

    def give(cluster: str | None = app.cluster_name) -> None:
        if not dry_run:
            hand_out(app.config, app.store_root, cluster, target, as_json)

    is_child = leave_root(app.store_root, give)
    # Late: root loads no library before it has become the store's owner.
    from reports.published.publish import OwnPublished
    from slurm_hooks.advice.publish import prepare, publish_site
    from slurm_hooks.advice.type_files import PublishedTimes, publish_times

    job, warnings = prepare(app, dry_run)
    done = publish_site(job)
    _warn([*warnings, *done.warnings])
    if not as_json:
        click.echo(_summary(done, dry_run))
    times, own, failures = PublishedTimes(), OwnPublished(), list[AlmanacError]()
    try:
        times = publish_times(job)
    except AlmanacError as error:  # the users' own reports do not depend on it
        failures.append(error)
    if times.written and not as_json:
        click.echo(f"{format_count(times.written)} files of run times by GPU type written")
    try:
        own = _publish_own(job)
    except AlmanacError as error:
        failures.append(error)
    _warn(own.warnings)
    told = {**vars(done), "times": vars(times), "own_reports": vars(own)}
    click.echo(json_text(told) if as_json else _own_summary(own, dry_run))
    if not is_child:
        give(app.cluster)
    if failures:
        raise failures[-1]


def _warn(warnings: Sequence[str]) -> None:
    for warning in warnings:
        click.echo(f"warning: {printable(warning, 1000)}", err=True)


def _publish_own(job: PublishRun) -> OwnPublished:
    from reports.published.publish import OwnFolder, OwnJob, publish_own

    return publish_own(OwnJob(job.site, OwnFolder(job.folder), job.is_dry))


def _summary(done: Published, is_dry: bool) -> str:
    would = "would be " if is_dry else ""
    lines = [
        f"{format_count(done.written)} files {would}written, {format_count(done.renewed)} renewed, "
        f"{format_count(done.removed)} removed, {format_count(done.unchanged)} unchanged; mode {done.mode}",
        f"{format_count(done.families)} families in the rewritten files",
    ]
    if done.cut:
        lines.append(f"{format_count(done.cut)} older families do not fit into 64 KiB")
    for users, what in (
        (done.no_uid, "users in the history have no account on this host"),
        (done.shared_uid, "users share a uid and get no file"),
    ):
        lines += _naming(users, what)
    if is_dry and done.changed:
        more = f" and {format_count(len(done.changed) - _NAMED)} more" if len(done.changed) > _NAMED else ""
        lines.append(f"would change: {', '.join(done.changed[:_NAMED])}{more}")
    return "\n".join(lines)


def _own_summary(own: OwnPublished, is_dry: bool) -> str:
    would = "would be " if is_dry else ""
    waiting = f", {format_count(own.waiting)} left for the next run" if own.waiting else ""
    lines = [
        f"{format_count(own.reports)} reports {would}written{waiting}; {format_count(own.lists)} lists of users' jobs "
        f"{would}written, {format_count(own.removed)} removed"
    ]
    if own.unwritable:
        lines.append(
            f"{format_count(own.unwritable)} reports are too large for a file, or hold a value that JSON cannot hold"
        )
    return "\n".join(lines)


def _naming(users: Sequence[str], what: str) -> list[str]:
    """A line that counts users and names the first ones; no line without users."""
    if not users:
        return []
    named = ", ".join(printable(user, 40) for user in users[:_NAMED])
    more = f" and {format_count(len(users) - _NAMED)} more" if len(users) > _NAMED else ""
    return [f"{format_count(len(users))} {what}: {named}{more}"]
