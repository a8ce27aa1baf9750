"""Table of the planners whose changes of jobs the commands of cli/job_changes.py show and carry out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import AlmanacError, ConfigError, NoModelError, StoreError
from cli.app import App

if TYPE_CHECKING:
    from advisor.watch.actions import PastStep, Run
    from advisor.watch.round import Round, WatchFinding
    from reports.mail.watch import WatchMail
    from slurm.backend import SlurmBackend
    from slurm_hooks.jobs.engine import JobEngine, JobPlan
    from slurm_hooks.jobs.log import ChangeHistory, JobLine, JobLog
    from slurm_hooks.types.decide import TypeCluster


@dataclass(frozen=True)
class PlannerRun:
    """Input of one run of a planner."""

    app: App
    backend: SlurmBackend
    log: JobLog
    is_applied: bool
    is_clearing: bool

    @cached_property
    def history(self) -> ChangeHistory:
        return self.log.history(self.app.cluster, self.app.now_s())

    @property
    def engine(self) -> dict[str, Any]:
        """Arguments of a JobEngine."""
        app = self.app
        bound = {"commands": app.commands, "clock": app.clock, "sleep": app.sleep, "cluster": app.cluster}
        return {**bound, "log": self.log}


@dataclass(frozen=True)
class JobPlanner:
    """A row of the table. name: of its log and lock. columns: widths by column. ends: what "waiting" and "undone" are
    called. plan, engine: both raise AlmanacError; short: a text of a request as the table shows it.
    """

    name: str
    plan: Callable[[PlannerRun], JobPlan]
    engine: Callable[[PlannerRun], JobEngine]
    columns: Mapping[str, int]
    ends: tuple[str, str]
    short: Callable[[JobLine, str], str] = lambda line, text: text or "-"
    any_backend: bool = False
    """True if slurm.backend chooses the way to Slurm."""
    about: tuple[str, str] = ("pending", "to change")
    """The words for what the plan counts, and for what it acts on."""
    says: str = "Slurm said: "
    failure: tuple[str, str] = ("cannot run as they are now", "scontrol show job, then scontrol release")
    """The words for jobs that are worse off than before, and for what to try."""


def _plan_site_factors(run: PlannerRun) -> JobPlan:
    from advisor.priority import require_ageing
    from slurm_hooks.priority.reprioritize import LEAST_CHANGE, PublishedSiteFactors, plan_site_factors

    app, backend = run.app, run.backend
    if run.is_applied and not run.is_clearing:
        require_ageing(backend.settings(), app.config.priority)
    published = PublishedSiteFactors(app.store, lambda: sum(sum(node.gpus.values()) for node in backend.nodes()))
    predict, model = (lambda requests: [], "") if run.is_clearing else _predictor(app, run.history)
    least = LEAST_CHANGE * app.config.priority.points_per_e
    return plan_site_factors(
        backend,
        run.history,
        predict,
        published,
        app.now_s(),
        model,
        run.is_clearing,
        least,
        app.config.priority.relief_points,
    )


def _predictor(app: App, history: ChangeHistory) -> tuple[Callable[[Sequence[Any]], Any], str]:
    """A function that predicts the site factors of many submissions, and the version of its model.

    Raises NoModelError, StoreError.
    """
    from advisor.artefacts import current_version
    from advisor.duration.service import priorities_of
    from advisor.from_store import load_usable
    from slurm_hooks.priority.reprioritize import overruns
    from telemetry.history import load_history

    store = app.store
    trained = load_usable(store.models_dir, app.now_s())
    if trained is None:
        raise NoModelError(f"no model is trained for {store.cluster}", "run `almanac train` first")

    def predict(requests: Sequence[Any]) -> Any:
        if not requests:
            return []
        past = load_history(store, user={request.user for request in requests}, running=True)
        overran = overruns(history.newest, past, app.config.priority.min_gpu_time_s)
        return priorities_of(requests, past, trained, app.config, app.now_s(), overran)

    return predict, current_version(store.models_dir) or ""


def _site_factor_engine(run: PlannerRun) -> JobEngine:
    from slurm_hooks.priority.reprioritize import SiteFactorEngine

    return SiteFactorEngine(**run.engine, backend=run.backend)


def _plan_raises(run: PlannerRun) -> JobPlan:
    from slurm_hooks.jobs.engine import require_release
    from slurm_hooks.mig.raise_plan import plan_raises, read_state

    settings = run.app.config.mig_raise
    require_release(run.backend.release())
    if run.is_applied and settings.mode != "apply" and not run.is_clearing:
        raise ConfigError(f'mig_raise.mode is "{settings.mode}"', 'set mig_raise.mode = "apply", or leave out --apply')
    state = read_state(run.app.commands, run.app.cluster, run.backend.reservations())
    return plan_raises(state, run.history, settings, run.app.now_s(), run.is_clearing)


def _raise_engine(run: PlannerRun) -> JobEngine:
    from slurm_hooks.jobs.engine import JobEngine
    from slurm_hooks.mig.raise_plan import why_unsound

    return JobEngine(**run.engine, why_undo=why_unsound)


def _type_of(line: JobLine, text: str) -> str:
    from slurm_hooks.mig.raise_plan import one_slice

    request = one_slice({line.key: text})
    return request.type if request else text


def _plan_placement(run: PlannerRun) -> JobPlan:
    from almanac.records import Counts
    from slurm.queue import read_queue
    from slurm_hooks.types.plan import plan_moves, plan_placement
    from slurm_hooks.types.request import accepts_any
    from slurm_hooks.types.run import no_speeds, read_terms, require_placement, speeds_or_fault

    app, history, settings, now_s = run.app, run.history, run.app.config.placement, run.app.now_s()
    if run.is_clearing:
        return plan_placement(types_now(app, run.backend), history, no_speeds, now_s, is_clearing=True)
    require_placement(settings, run.backend.release())
    users = {job.user for job in read_queue(app.commands, app.store.cluster).jobs if accepts_any(job.comment)}
    # The history is read before Slurm is: a large one takes longer than such a look may be old.
    speeds = speeds_or_fault(app.store, app.config, now_s, users) if users else no_speeds
    cluster = types_now(app, run.backend)
    try:
        plan = plan_placement(cluster, history, speeds, now_s)
        if not run.is_applied:
            _warn_of_types(run, is_fault_known=plan.fault is not None)
        if not settings.requeue or plan.fault is not None:
            return plan
        running, told = Counts(), run.backend.settings()
        moves = plan_moves(
            cluster, history, speeds, plan, lambda job: read_terms(app.commands, job, told), now_s, running
        )
    except ValueError as error:
        raise StoreError(f"no placement was found: {error}", "report this; nothing was changed") from error
    return replace(plan, requeues=moves, running=running)


def types_now(app: App, backend: SlurmBackend) -> TypeCluster:
    from slurm_hooks.types.decide import cluster_of
    from slurm_hooks.types.run import read_view

    return cluster_of(read_view(backend, app.commands, app.cluster, app.clock), app.config.placement)


def _warn_of_types(run: PlannerRun, is_fault_known: bool) -> None:
    """Of placement.types that Slurm, [[gpu_types]], or the trained speeds do not know; a fault is not said twice."""
    from advisor.artefacts import load_speeds
    from slurm_hooks.types.run import type_faults

    try:
        table = load_speeds(run.app.store.models_dir)
    except AlmanacError:
        return  # the plan's fault
    settings = run.app.config.placement
    learned = table.names if table is not None else (settings.types if is_fault_known else None)
    for fault in type_faults(settings, run.backend.nodes(), run.app.config.gpu_types, learned):
        click.echo(f"warning: {fault.said}\ntry: {fault.todo}", err=True)


def _placement_engine(run: PlannerRun) -> JobEngine:
    from slurm_hooks.types.run import PlacementEngine

    return PlacementEngine(**run.engine, backend=run.backend, settings=run.app.config.placement)


PLANNERS = {
    each.name: each
    for each in (
        JobPlanner(
            "reprioritize", _plan_site_factors, _site_factor_engine,
            {"job": 40, "user": 32, "now": 11, "new": 11, "why": 200},
            ("changed", "were reset to 0"), any_backend=True,
        ),
        JobPlanner(
            "mig-raise", _plan_raises, _raise_engine, {"job": 12, "user": 10, "from": 12, "to": 12, "why": 26},
            ("raised, and still waiting", "got their own type back"), _type_of,
        ),
        JobPlanner(
            "place", _plan_placement, _placement_engine,
            {"job": 10, "user": 10, "what": 7, "from": 15, "to": 15, "why": 30},
            ("placed, and still waiting", "got their own request back"),
        ),
    )
}  # fmt: skip


def watch_planner(
    round_: Round, findings: Sequence[WatchFinding], look_again: Callable[[], tuple[Round, Iterable[WatchFinding]]]
) -> JobPlanner:
    """The row of `almanac watch`. look_again: one more round, and what is found in it, right before a cancel."""

    def mail(app: App) -> WatchMail:
        from reports.mail.watch import WatchMail

        return WatchMail(app.config, app.cluster, app.now_s)

    def plan(run: PlannerRun) -> JobPlan:
        from slurm_hooks.watch.act import RECORD_DAYS, plan_steps

        app = run.app
        lines = run.log.read(app.cluster, app.now_s(), RECORD_DAYS)
        return plan_steps(round_, findings, lines, app.config.watch, mail(app).why_no_mail, app.now_s())

    def engine(run: PlannerRun) -> JobEngine:
        from slurm_hooks.watch.act import WatchEngine

        post = mail(run.app).hand_over
        return WatchEngine(**run.engine, hand_over=post, look_again=look_again, settings=run.app.config.watch)

    return JobPlanner(
        "watch", plan, engine, {"job": 16, "user": 12, "what": 9, "why": 38}, ("", ""), about=("found", "to act on"),
        says="", failure=("still run after scancel", "scontrol show job, and slurmctld's log"),
    )  # fmt: skip


def steps_taken(app: App) -> dict[Run, list[PastStep]]:
    """Return the steps of the watch that still count, by run of a job. Raises StoreError."""
    from slurm_hooks.jobs.log import JobLog
    from slurm_hooks.watch.act import RECORD_DAYS, past_steps

    return past_steps(JobLog(app.store.root / "actions", "watch").read(app.cluster, app.now_s(), RECORD_DAYS))
