"""`almanac mig`: layouts that follow the jobs, larger idle slices for pending jobs, and simulations of both."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from almanac.errors import ConfigError
from cli.app import App
from cli.mig_paper import command as paper_command
from cli.mig_raise import command as raise_command
from cli.mig_simulate import command as simulate_command

if TYPE_CHECKING:
    from slurm_hooks.mig.demand import Demand
    from slurm_hooks.mig.folder import MigFolder
    from slurm_hooks.mig.planning import MigPlanner
    from slurm_hooks.mig.run import MigRun
    from telemetry.slurm.gpu_queue import QueuedGpuJob

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("mig")
def command() -> None:
    """Cut GPUs into the slices that recent jobs ask for, and simulate it first. For operators, and timers.

    almanac changes only nodes of mig.nodes that have no job and no reservation. It never ends a job. With
    mig.drain_busy, it also drains busy nodes and waits until their jobs have ended.
    """


@command.command("plan")
@as_json
@click.pass_obj
def plan(app: App, as_json: bool) -> None:
    """Show the layouts that recent jobs and the queue ask for. Writes nothing, and sends nothing to Slurm."""
    from cli.mig_output import show_plan

    show_plan(_planner(app).plan(_folder(app).load(_cluster(app)), app.now_s()), app.config.mig, as_json)


@command.command("apply")
@as_json
@click.pass_obj
def apply(app: App, as_json: bool) -> int:
    """Change layouts once, and finish what an earlier run left. Run this from a timer; a missed run does no harm.

    Acts only with mig.mode = "apply". With "observe", it logs what it would do. For each node: drain, apply through
    mig-parted, write Gres, reconfigure Slurm, verify on the node and in Slurm, resume. It writes each step to
    mig/actions-*.jsonl in the store first. A node that fails stays drained, and its reason says why.

    \b
    Exit code 4: another run is active, or the store cannot be read or written.
    Exit code 5: Slurm did not answer, or a node failed and stays drained.
    """
    from cli.mig_output import show_run
    from slurm_hooks.mig.stuck import StuckJobs, release

    mode = app.config.mig.mode
    if mode == "off":
        click.echo('mig.mode is "off": nothing is planned, and nothing is sent to Slurm', err=True)
        return 0
    planner, folder = _planner(app), _folder(app)
    with folder.lock():
        run = _run(app, planner)
        run.load()
        if mode == "apply":
            run.drive()  # what an earlier run left comes first: it needs no plan
        made = planner.plan(run.state, app.now_s())
        run.wanted = made.demand.types
        if mode == "observe":
            run.observe(made.changes)
            if app.config.mig.drain_busy:
                run.observe(made.plan.drains, "plan drain")
            show_run(made, [], StuckJobs(), [], app.config.mig, as_json)
            return 0
        run.give_back(made.unwanted, "the demand no longer asks for the change")
        run.begin(made.changes)
        if app.config.mig.drain_busy:
            run.begin(made.plan.drains, is_patient=True)
        run.drive()
        after = planner.plan(run.state, app.now_s()).stuck
        run.state, said = release(after.release, run.slurm, folder, run.state, run.cluster, app.now_s())
    outcomes = list(run.outcomes.values())
    show_run(made, outcomes, after, said, app.config.mig, as_json)
    return 5 if said or any(each.what in ("failed", "left") for each in outcomes) else 0


@command.command("status")
@as_json
@click.pass_obj
def status(app: App, as_json: bool) -> None:
    """Show the nodes under change, those that failed with what to do, and the last changes."""
    from cli.mig_output import show_status

    app.require_operator("MIG layouts affect all users")
    folder, now_s = _folder(app), app.now_s()
    show_status(folder.load(_cluster(app)), list(folder.log.read(now_s - 7 * 86_400, now_s)), now_s, as_json)


@command.command("retry")
@click.argument("node")
@click.option("--old", "to_old", is_flag=True, help="Go back to the old layout.")
@click.pass_obj
def retry(app: App, node: str, to_old: bool) -> int:
    """Take up a failed change of NODE again, or go back to its old layout. The node is resumed once it is verified."""
    from cli.mig_output import show_outcomes

    if app.config.mig.mode != "apply":
        raise ConfigError(f'mig.mode is "{app.config.mig.mode}": nothing is changed', 'set mig.mode = "apply"')
    planner = _planner(app)
    with _folder(app).lock():
        run = _run(app, planner)
        run.load()
        run.take_again(node, to_old)
        run.drive()
    outcomes = list(run.outcomes.values())
    show_outcomes(outcomes)
    return 5 if any(each.what in ("failed", "left") for each in outcomes) else 0


DEMAND_DAYS = 7.0
"""Days of past jobs that a plan looks at: a week has each day's pattern once."""
RESERVATION_S = 7200.0
"""A node with a reservation that starts within this time is not changed: a change takes up to an hour."""


def _planner(app: App) -> MigPlanner:
    """Raises AlmanacError if the caller, the configuration, or the store does not allow a plan."""
    from advisor.decisions.mig_layout import decide_layout
    from slurm_hooks.mig.demand import read_demand
    from slurm_hooks.mig.node_side import NodeSide, run_bounded
    from slurm_hooks.mig.planning import MigPlanner
    from slurm_hooks.mig.settings import mig_settings
    from slurm_hooks.mig.slurm_side import SlurmSide

    app.require_operator("MIG layouts affect all users")
    settings, store, backend = mig_settings(app.config.mig), app.cluster_store(), app.backend
    if (answers := backend.cluster()).lower() != store.cluster.lower():
        raise ConfigError(
            f"the store's cluster is {store.cluster}, Slurm's is {answers}", "correct --cluster or site.cluster"
        )
    config = settings.config
    models = {each.model.name: each for each in settings.names.values()}

    def demand(queue: list[QueuedGpuJob]) -> Demand:
        return read_demand(store, queue, list(models.values()), app.config.advice, DEMAND_DAYS, app.now_s())

    return MigPlanner(
        settings=settings,
        slurm=SlurmSide(backend, app.commands, RESERVATION_S),
        node_side=NodeSide(config, run_bounded),
        decide=decide_layout,
        demand_of=demand,  # type: ignore[arg-type]
    )


def _run(app: App, planner: MigPlanner) -> MigRun:
    """Until there is a plan, the types that the queue asks for are those that jobs want."""
    from pathlib import Path

    from slurm_hooks.mig.include import IncludeFile
    from slurm_hooks.mig.run import MigRun

    return MigRun(
        settings=planner.settings,
        folder=_folder(app),
        slurm=planner.slurm,
        node_side=planner.node_side,
        include=IncludeFile(Path(planner.settings.config.include_file)),
        cluster=_cluster(app),
        clock=time.time,
        sleep=time.sleep,
        wanted={job.gpu_type for job in planner.slurm.queue() if job.gpu_type},
    )


def _cluster(app: App) -> str:
    return app.cluster_store().cluster


def _folder(app: App) -> MigFolder:
    from slurm_hooks.mig.folder import MigFolder

    return MigFolder(app.store_root / "mig")


for each in (raise_command, simulate_command, paper_command):
    command.add_command(each)
