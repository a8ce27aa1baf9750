"""`almanac mig`: layouts that follow the jobs, larger idle slices for pending jobs, and simulations of both."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import ConfigError
from almanac.units import format_duration, printable
from cli.app import App, CommandGroup
from cli.job_changes import mig_raise as raise_command
from cli.output import json_text, say, show_record
from cli.simulate import mig_command as simulate_command

if TYPE_CHECKING:
    from almanac.actions_config import Mig
    from slurm.queued_job import QueuedJob
    from slurm_hooks.mig.planning import LayoutDemand, MigPlan, MigPlanner
    from slurm_hooks.mig.run import MigRun, Outcome
    from slurm_hooks.mig.sides import StuckJobs
    from slurm_hooks.mig.steps import MigState
    from slurm_hooks.nodes.engine import NodeFolder


as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group("mig", cls=CommandGroup)
def command() -> None:
    """Cut GPUs into the slices that recent jobs ask for, and simulate it first. For operators, and timers.

    almanac changes only nodes of mig.nodes that have no job and no reservation. It never ends a job. With
    mig.drain_busy, it also drains busy nodes and waits until their jobs have ended.
    """


@command.command("plan")
@click.option("--apply", "is_applied", is_flag=True, help="Do it once: for a timer. [only show it]")
@as_json
@click.pass_obj
def plan(app: App, is_applied: bool, as_json: bool) -> int:
    """Show the layouts that recent jobs and the queue ask for, or change them with --apply.

    Without --apply it writes nothing, and sends nothing to Slurm. --apply changes layouts once, and finishes what an
    earlier run left. It acts only with mig.mode = "apply". With "observe", it logs what it would do. For each node:
    drain, apply through mig-parted, write Gres, reconfigure Slurm, verify on the node and in Slurm, resume. It writes
    each step to mig/actions-*.jsonl in the store first. A node that fails stays drained, and its reason says why. A
    missed run does no harm.

    \b
    Exit code 4: another run is active, or the store cannot be read or written.
    Exit code 5: Slurm did not answer, or a node failed and stays drained.
    """
    from slurm_hooks.mig.sides import StuckJobs, release

    mode = app.config.mig.mode
    if not is_applied:
        show_plan(_planner(app).plan(_folder(app).load(_cluster(app)), app.now_s()), app.config.mig, as_json)
        return 0
    if mode == "off":
        click.echo('mig.mode is "off": nothing is planned, and nothing is sent to Slurm', err=True)
        return 0
    planner = _planner(app)
    with _folder(app).lock():
        run = _run(app, planner)
        if mode == "apply":
            run.drive()  # what an earlier run left comes first: it needs no plan
        made = planner.plan(run.state, app.now_s())
        run.wanted = made.demand.types
        if mode == "observe":
            run.observe(made.plan.changes, "change")
            if app.config.mig.drain_busy:
                run.observe(made.plan.drains, "drain")
            show_run(made, [], StuckJobs(), [], app.config.mig, as_json)
            return 0
        run.give_back(made.unwanted, "the demand no longer asks for the change")
        run.begin(made.plan.changes)
        if app.config.mig.drain_busy:
            run.begin(made.plan.drains, is_patient=True)
        run.drive()
        after = planner.plan(run.state, app.now_s()).stuck
        run.state, said = release(after.release, run.slurm, run.engine, run.state)
    outcomes = list(run.outcomes.values())
    show_run(made, outcomes, after, said, app.config.mig, as_json)
    return 5 if said or any(each.what in ("failed", "left") for each in outcomes) else 0


@command.command("status")
@as_json
@click.pass_obj
def status(app: App, as_json: bool) -> None:
    """Show the nodes under change, those that failed with what to do, and the last changes."""

    app.require_operator("MIG layouts affect all users")
    folder, now_s = _folder(app), app.now_s()
    show_status(folder.load(_cluster(app)), folder.rows(7, now_s), now_s, as_json)


@command.command("retry")
@click.argument("node")
@click.option("--old", "to_old", is_flag=True, help="Go back to the old layout.")
@click.pass_obj
def retry(app: App, node: str, to_old: bool) -> int:
    """Take up a failed change of NODE again, or go back to its old layout. The node is resumed once it is verified."""

    if app.config.mig.mode != "apply":
        raise ConfigError(f'mig.mode is "{app.config.mig.mode}": nothing is changed', 'set mig.mode = "apply"')
    planner = _planner(app)
    with _folder(app).lock():
        run = _run(app, planner)
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
    from advisor.mig.decide import decide_layout
    from slurm_hooks.mig.layouts import mig_settings
    from slurm_hooks.mig.planning import MigPlanner, read_demand
    from slurm_hooks.mig.sides import NodeSide, SlurmSide, run_bounded

    settings, backend = mig_settings(app.config.mig), app.backend
    store = app.acting_store(backend, "MIG layouts affect all users")
    config = settings.config
    models = {each.model.name: each for each in settings.names.values()}

    def demand(queue: list[QueuedJob]) -> LayoutDemand:
        return read_demand(store, queue, list(models.values()), app.config.advice, DEMAND_DAYS, app.now_s())

    return MigPlanner(
        settings=settings,
        slurm=SlurmSide(backend, app.commands, RESERVATION_S, store.cluster),
        node_side=NodeSide(config, run_bounded),
        decide=decide_layout,
        demand_of=demand,  # type: ignore[arg-type]
    )


def _run(app: App, planner: MigPlanner) -> MigRun:
    """Until there is a plan, the types that the queue asks for are those that jobs want. Raises StoreError."""
    from pathlib import Path

    from slurm_hooks.mig.run import MigRun
    from slurm_hooks.mig.sides import IncludeFile
    from slurm_hooks.nodes.engine import NodeEngine

    run = MigRun(
        settings=planner.settings,
        engine=NodeEngine(_folder(app), planner.slurm.backend, _cluster(app), time.time),
        slurm=planner.slurm,
        node_side=planner.node_side,
        include=IncludeFile(Path(planner.settings.config.include_file)),
        sleep=time.sleep,
        wanted={job.gpu_type for job in planner.slurm.queue() if job.gpu_type},
    )
    run.load()
    return run


def _cluster(app: App) -> str:
    return app.cluster


def _folder(app: App) -> NodeFolder[MigState]:
    from slurm_hooks.mig.steps import MigState
    from slurm_hooks.nodes.engine import NodeFolder

    return NodeFolder(app.store_root / "mig", MigState)


for each in (raise_command, simulate_command):
    command.add_command(each)


ROWS = 20
_TODO = {
    "drain": "see whether Slurm takes `scontrol update nodename={node} state=drain`",
    "wait": "end the jobs on it, or resume it: its layout was not changed",
    "apply": "end what uses the GPUs (dcgm, persistenced), then `almanac mig retry {node}`",
    "gres": "correct the include file or mig.register_command, and gres.conf; then `almanac mig retry {node}`",
    "reconfigure": "see why slurmctld does not take its configuration, then `almanac mig retry {node}`",
    "register": "see why slurmd does not register {node} with its new Gres, then `almanac mig retry {node}`",
    "settle": "see why slurmd does not start on {node}, then `almanac mig retry {node}`",
    "verify": "compare `nvidia-smi -L` there with Gres in Slurm, then `almanac mig retry {node}`",
    "resume": "compare `nvidia-smi -L` there with Gres in Slurm, then `almanac mig retry {node}`",
}


def show_plan(made: MigPlan, config: Mig, as_json: bool) -> None:
    """Print a plan."""
    if as_json:
        click.echo(json_text(_plan_json(made)))
        return
    _nodes_and_demand(made)
    _changes(made, config)
    _stuck(made.stuck, "would be released")
    say(0, "nothing was changed (this is a plan)")


def show_run(
    made: MigPlan, outcomes: Sequence[Outcome], stuck: StuckJobs, said: Sequence[str], config: Mig, as_json: bool
) -> None:
    """Print what a run did."""
    if as_json:
        content = {
            **_plan_json(made), "mode": config.mode,
            "outcomes": [{"node": each.node, "what": each.what, "why": each.why} for each in outcomes],
            "released": [job.address for job in stuck.release], "still_stuck": [job.address for job in stuck.wait],
            "said": list(said),
        }  # fmt: skip
        click.echo(json_text(content))
        return
    _changes(made, config)
    show_outcomes(outcomes)
    _stuck(stuck, "released")
    for line in dict.fromkeys(said):
        click.echo(f"Slurm said: {printable(line)}", err=True)
    if config.mode != "apply":
        say(0, f'nothing was changed (mig.mode is "{config.mode}")')


def show_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print what became of each node."""
    for each in outcomes:
        say(0, f"{each.node}: {each.what}{f': {each.why}' if each.why else ''}")
        if each.what == "failed" and each.change:
            say(2, f"the node stays drained; {_TODO[each.change.stage].format(node=each.node)}")


def show_status(state: MigState, rows: Sequence[Mapping[str, Any]], now_s: int, as_json: bool) -> None:
    """Print the changes under way, those that failed, and the newest lines of the log."""
    if as_json:
        content = {"changes": [asdict(each) for each in state.changes.values()], "changed_s": dict(state.changed_s)}
        click.echo(json_text({**content, "actions": list(rows)}))
        return
    from slurm_hooks.mig.layouts import shown

    if not state.changes:
        say(0, "no node is under change")
    for each in state.changes.values():
        what = "failed" if each.fault else f"at stage {each.stage} for {format_duration(max(0, now_s - each.stage_s))}"
        say(0, f"{each.node}: {shown(each.old)} -> {shown(each.new)}: {what}")
        if each.fault:
            say(2, f"{each.fault}; it stays drained")
            say(2, _TODO[each.stage].format(node=each.node))
    show_record(rows, ROWS)


def _nodes_and_demand(made: MigPlan) -> None:
    from slurm_hooks.mig.layouts import shown

    for row in made.nodes:
        layout = shown(row.layout) if row.layout else f"Gres={row.gres or 'none'}, not read from the node"
        say(0, f"{row.name} ({row.model}): {layout}")
        if row.refusal:
            say(2, f"not changed: {row.refusal}")
    demand = made.demand
    say(0, f"demand: {demand.past} past jobs of one GPU or slice, {demand.waiting} waiting")
    if demand.unknown:
        say(2, f"{demand.unknown} past jobs without measured memory count as the shape that they had")
    shapes: dict[str, int] = {}
    for job in demand.jobs:
        shapes[job.shape] = shapes.get(job.shape, 0) + 1
    if shapes:
        say(2, "smallest shape that holds them: " + ", ".join(f"{n} x {name}" for name, n in sorted(shapes.items())))
    if made.plan.wait_now_s is not None and made.plan.wait_then_s is not None:
        now, then = format_duration(made.plan.wait_now_s), format_duration(made.plan.wait_then_s)
        say(2, f"expected mean wait: {now} with the layouts of now, {then} with the plan")


def _changes(made: MigPlan, config: Mig) -> None:
    from slurm_hooks.mig.layouts import shown

    for each in made.plan.changes:
        say(0, f"change {each.node}: {shown(each.old)} -> {shown(each.new)}")
        say(2, each.reason)
    for each in made.plan.drains:
        say(0, f"change {each.node} when its jobs have ended: {shown(each.old)} -> {shown(each.new)}")
        say(2, each.reason if config.drain_busy else f"{each.reason}; not drained: mig.drain_busy is off")
    for name in made.unwanted:
        say(0, f"give {name} back: the demand no longer asks for the change that it is drained for")
    if not made.plan.changes:
        say(0, f"no change: {made.plan.why_none or 'the layouts fit the demand'}")


def _stuck(stuck: StuckJobs, word: str) -> None:
    if stuck.release:
        say(0, f"{word}, because their GPU type is back: {', '.join(job.address for job in stuck.release[:ROWS])}")
    for job in stuck.wait[:ROWS]:
        say(0, f"job {job.address} waits for {job.gpu_type}, which no node in service has")


def _plan_json(made: MigPlan) -> dict[str, Any]:
    return {
        "nodes": [asdict(row) for row in made.nodes],
        "demand": {"past": made.demand.past, "waiting": made.demand.waiting, "unknown": made.demand.unknown,
                   "types": sorted(made.demand.types)},
        "changes": [asdict(each) for each in made.plan.changes],
        "drains": [asdict(each) for each in made.plan.drains],
        "give_back": list(made.unwanted),
        "why_none": made.plan.why_none,
        "wait_now_s": made.plan.wait_now_s,
        "wait_then_s": made.plan.wait_then_s,
        "stuck": {"release": [job.address for job in made.stuck.release],
                  "wait": [job.address for job in made.stuck.wait]},
    }  # fmt: skip
