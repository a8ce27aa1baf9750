"""`almanac reprioritize`: set the site factor of pending jobs to the model's current prediction."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import ConfigError, NoModelError
from almanac.records import Counts
from almanac.units import format_count, printable
from cli.app import App
from cli.output import json_text, show_table
from cli.selection import COUNT

if TYPE_CHECKING:
    from slurm_hooks.priority.action_log import LoggedAction
    from slurm_hooks.priority.reprioritize import Actor, ReprioritizeOutcome, SiteFactorChange
    from telemetry.slurm.backend import SlurmBackend
    from telemetry.store.cluster_store import ClusterStore

SHOWN, SAID = 20, 5


@click.command("reprioritize")
@click.option("--apply", "is_applied", is_flag=True, help="Send the changes to Slurm. [only show them]")
@click.option("--clear", "is_clearing", is_flag=True, help="Reset to 0 the site factors that this command set.")
@click.option("-n", "--rows", type=COUNT, default=SHOWN, show_default=True, help="Number of changes to show; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes, the counts, and the outcome as JSON.")
@click.pass_obj
def command(app: App, is_applied: bool, is_clearing: bool, rows: int, as_json: bool) -> int:
    """Set the site factor of pending GPU jobs to the model's current prediction. For operators, and a timer.

    Only shows the changes unless you give --apply, which needs priority.mode = "apply", weights in slurm.conf that fit
    (see `almanac doctor`), and root, SlurmUser, or AdminLevel=Operator. Skips jobs whose site factor somebody else set.
    Writes each change to actions/ in the store, then sends it to Slurm. A second run changes nothing.

    Exit code 5: Slurm did not answer, or refused some changes; the next run tries again.
    """
    from slurm_hooks.priority.reprioritize import ReprioritizeOutcome

    app.require_operator("the queue holds all users' jobs")
    store = app.cluster_store()
    backend = app.backend
    if (answers := backend.cluster()).lower() != store.cluster.lower():
        raise ConfigError(
            f"the store's cluster is {store.cluster}, Slurm's is {answers}", "correct --cluster or site.cluster"
        )
    counts, outcome = Counts(), ReprioritizeOutcome()
    with one_at_a_time(store) if is_applied else contextlib.nullcontext():
        actor, changes, agreed = _plan(app, store, backend, is_applied, is_clearing, counts)
        if is_applied:
            actor.note(agreed)
            outcome = actor.apply(changes)
    _show(changes, counts, outcome if is_applied else None, rows, as_json)
    return 5 if outcome.failed else 0


def one_at_a_time(store: ClusterStore) -> contextlib.AbstractContextManager[None]:
    """Raises BusyError if another run is active, StoreError if the store is not writable."""
    from telemetry.store.atomic import locked
    from telemetry.store.marks import safe_name

    return locked(store.root / f".reprioritize-{safe_name(store.cluster)}.lock", "is setting site factors")


def _plan(
    app: App, store: ClusterStore, backend: SlurmBackend, is_applied: bool, is_clearing: bool, counts: Counts
) -> tuple[Actor, list[SiteFactorChange], list[SiteFactorChange]]:
    """Raises ConfigError if site factors must not be set, NoModelError if nothing was trained."""
    from advisor.artefacts import current_version
    from advisor.decisions.priority import require_ageing
    from slurm_hooks.priority.action_log import ActionLog
    from slurm_hooks.priority.published_site_factors import PublishedSiteFactors
    from slurm_hooks.priority.reprioritize import Actor, plan_clearing, plan_site_factors

    log = ActionLog(store.root / "actions")
    model = current_version(store.models_dir) or ""
    actor = Actor(backend, log, store.cluster, model, app.now_s)
    known = log.newest(store.cluster, app.now_s())
    if is_clearing:
        return actor, plan_clearing(backend, known, counts), []
    if is_applied:
        require_ageing(backend.configuration(), app.config.priority)
    predict = _predictor(app, store, known)
    published = PublishedSiteFactors(store, lambda: _gpus(backend))
    return actor, *plan_site_factors(backend, known, predict, published, counts)


def _gpus(backend: SlurmBackend) -> int:
    from almanac.tres import parse_gpus

    return sum(parse_gpus(node.gres).count for node in backend.nodes())


def _predictor(app: App, store: ClusterStore, known: Mapping[int, LoggedAction]) -> Any:
    """A function that predicts the site factors of many submissions. Raises NoModelError, StoreError."""
    from advisor.artefacts import load
    from advisor.lifecycle import trusted
    from advisor.services.gpu_time import priorities_of
    from slurm_hooks.priority.overruns import overruns
    from telemetry.history import load_history

    trained = trusted(load(store.models_dir), app.config, app.now_s())
    if trained is None:
        raise NoModelError(f"no model is trained for {store.cluster}", "run `almanac train` first")

    def predict(requests: Sequence[Any]) -> Sequence[Any]:
        if not requests:
            return []
        history = load_history(store, user={request.user for request in requests}, running=True)
        overran = overruns(known, history, app.config.priority.min_gpu_time_s)
        return priorities_of(requests, history, trained, app.config, overran)

    return predict


def _show(
    changes: Sequence[SiteFactorChange], counts: Counts, outcome: ReprioritizeOutcome | None, rows: int, as_json: bool
) -> None:
    if as_json:
        click.echo(json_text(_as_json(changes, counts, outcome)))
        return
    shown = changes[: rows or None]
    if shown:
        columns = ["job", "user", "now", "new" if outcome is None else "set", "why"]
        cells = [[each.job.address, each.job.user, str(each.old), str(each.new), each.reason] for each in shown]
        show_table(columns, cells, right=columns[2:4])
    if len(changes) > len(shown):
        click.echo(f"... and {format_count(len(changes) - len(shown))} more")
    click.echo(f"{format_count(counts.seen)} pending, {format_count(len(changes))} to change")
    for reason, number in sorted(counts.dropped.items()):
        click.echo(f"  {format_count(number)} unchanged: {reason}")
    if outcome is None:
        click.echo("dry run: nothing was sent to Slurm; use --apply")
        return
    click.echo(f"{format_count(outcome.taken)} changed")
    ends = {
        "started, ended, or held meanwhile": outcome.gone,
        "accepted by Slurm, but without effect": outcome.ignored,
        "refused": outcome.failed,
    }
    for what, number in ends.items():
        if number:
            click.echo(f"  {format_count(number)} {what}")
    for line in outcome.said[:SAID]:
        click.echo(f"Slurm said: {printable(line)}", err=True)


def _as_json(
    changes: Sequence[SiteFactorChange], counts: Counts, outcome: ReprioritizeOutcome | None
) -> dict[str, Any]:
    return {
        "applied": outcome is not None,
        "pending": counts.seen,
        "changes": [
            {"job_id": each.job.job_id, "user": each.job.user, "old": each.old, "new": each.new, "reason": each.reason}
            for each in changes
        ],
        "left_alone": dict(counts.dropped),
        "outcome": vars(outcome) if outcome else None,
    }
