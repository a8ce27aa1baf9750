"""The output of `almanac mig`, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_duration, format_moment, printable
from cli.output import json_text

if TYPE_CHECKING:
    from advisor.decisions.mig_layout import LayoutChange
    from almanac.actions_config import Mig
    from slurm_hooks.mig.folder import MigState
    from slurm_hooks.mig.planning import MigPlan
    from slurm_hooks.mig.run import Outcome
    from slurm_hooks.mig.stuck import StuckJobs

COLUMNS = 80
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
    _say(0, "nothing was changed (this is a plan)")


def show_run(
    made: MigPlan, outcomes: Sequence[Outcome], stuck: StuckJobs, said: Sequence[str], config: Mig, as_json: bool
) -> None:
    """Print what a run did."""
    if as_json:
        content = {
            **_plan_json(made), "mode": config.mode, "outcomes": [_outcome_json(each) for each in outcomes],
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
        _say(0, f'nothing was changed (mig.mode is "{config.mode}")')


def show_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print what became of each node."""
    for each in outcomes:
        _say(0, f"{each.node}: {each.what}{f': {each.why}' if each.why else ''}")
        if each.what == "failed" and each.change:
            _say(2, f"the node stays drained; {_TODO[each.change.stage].format(node=each.node)}")


def show_status(state: MigState, rows: Sequence[Mapping[str, Any]], now_s: int, as_json: bool) -> None:
    """Print the changes under way, those that failed, and the newest lines of the log."""
    if as_json:
        content = {"changes": [asdict(each) for each in state.changes.values()], "changed_s": dict(state.changed_s)}
        click.echo(json_text({**content, "actions": list(rows)}))
        return
    from slurm_hooks.mig.layouts import shown

    if not state.changes:
        _say(0, "no node is under change")
    for each in state.changes.values():
        what = "failed" if each.fault else f"at stage {each.stage} for {format_duration(max(0, now_s - each.stage_s))}"
        _say(0, f"{each.node}: {shown(each.old)} -> {shown(each.new)}: {what}")
        if each.fault:
            _say(2, f"{each.fault}; it stays drained")
            _say(2, _TODO[each.stage].format(node=each.node))
    for row in rows[-ROWS:]:
        time_s = row.get("time_s")
        when = format_moment(time_s) if isinstance(time_s, int) else "?"
        whom = row.get("node") or f"job {row.get('job', '?')}"
        _say(0, f"{when}  {whom}  {row.get('what', '?')}: {row.get('why', '')}")


def _nodes_and_demand(made: MigPlan) -> None:
    from slurm_hooks.mig.layouts import shown

    for row in made.nodes:
        layout = shown(row.layout) if row.layout else f"Gres={row.gres or 'none'}, not read from the node"
        _say(0, f"{row.name} ({row.model}): {layout}")
        if row.refusal:
            _say(2, f"not changed: {row.refusal}")
    demand = made.demand
    _say(0, f"demand: {demand.past} past jobs of one GPU or slice, {demand.waiting} waiting")
    if demand.unknown:
        _say(2, f"{demand.unknown} past jobs without measured memory count as the shape that they had")
    shapes: dict[str, int] = {}
    for job in demand.jobs:
        shapes[job.shape] = shapes.get(job.shape, 0) + 1
    if shapes:
        _say(2, "smallest shape that holds them: " + ", ".join(f"{n} x {name}" for name, n in sorted(shapes.items())))
    if made.plan.wait_now_s is not None and made.plan.wait_then_s is not None:
        now, then = format_duration(made.plan.wait_now_s), format_duration(made.plan.wait_then_s)
        _say(2, f"expected mean wait: {now} with the layouts of now, {then} with the plan")


def _changes(made: MigPlan, config: Mig) -> None:
    from slurm_hooks.mig.layouts import shown

    for each in made.changes:
        _say(0, f"change {each.node}: {shown(each.old)} -> {shown(each.new)}")
        _say(2, each.reason)
    for each in made.plan.drains:
        _say(0, f"change {each.node} when its jobs have ended: {shown(each.old)} -> {shown(each.new)}")
        _say(2, each.reason if config.drain_busy else f"{each.reason}; not drained: mig.drain_busy is off")
    for name in made.unwanted:
        _say(0, f"give {name} back: the demand no longer asks for the change that it is drained for")
    if not made.changes:
        _say(0, f"no change: {made.plan.why_none or 'the layouts fit the demand'}")


def _stuck(stuck: StuckJobs, word: str) -> None:
    if stuck.release:
        _say(0, f"{word}, because their GPU type is back: {', '.join(job.address for job in stuck.release[:ROWS])}")
    for job in stuck.wait[:ROWS]:
        _say(0, f"job {job.address} waits for {job.gpu_type}, which no node in service has")


def _plan_json(made: MigPlan) -> dict[str, Any]:
    return {
        "nodes": [asdict(row) for row in made.nodes],
        "demand": {"past": made.demand.past, "waiting": made.demand.waiting, "unknown": made.demand.unknown,
                   "types": sorted(made.demand.types)},
        "changes": [_change_json(each) for each in made.changes],
        "drains": [_change_json(each) for each in made.plan.drains],
        "give_back": list(made.unwanted),
        "why_none": made.plan.why_none,
        "wait_now_s": made.plan.wait_now_s,
        "wait_then_s": made.plan.wait_then_s,
        "stuck": {"release": [job.address for job in made.stuck.release],
                  "wait": [job.address for job in made.stuck.wait]},
    }  # fmt: skip


def _change_json(change: LayoutChange) -> dict[str, Any]:
    return asdict(change)


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {"node": outcome.node, "what": outcome.what, "why": outcome.why}


def _say(indent: int, text: str) -> None:
    space = " " * indent
    said = textwrap.wrap(
        printable(text, 2000), COLUMNS, initial_indent=space, subsequent_indent=f"{space}  ", break_on_hyphens=False
    )
    click.echo("\n".join(said))
