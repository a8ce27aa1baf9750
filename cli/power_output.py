"""The output of `almanac power`, in 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_moment, printable
from cli.output import json_text

if TYPE_CHECKING:
    from almanac.actions_config import PowerMode
    from slurm_hooks.power.planning import PowerPlan, SetPlan
    from slurm_hooks.power.run import SetOutcome
    from slurm_hooks.power.status import SetStatus, Status
    from slurm_hooks.power.waking import Woken
    from telemetry.slurm.node_sets import LiveDemand

COLUMNS = 80
MOST_NAMES = 200
_STAY = "in use, reserved, excluded, cooling down, out of power cycles, warm minimum, or above 20 in a run"


def show_plan(plan: PowerPlan, outcomes: Sequence[SetOutcome] | None, mode: PowerMode | None, as_json: bool) -> None:
    """Print a plan, or the outcome of a run."""
    if as_json:
        click.echo(json_text(_plan_json(plan, outcomes)))
        return
    for place, each in enumerate(plan.sets):
        _say(0, f"{each.node_set}: {_counts(each.demand, each.powered)}")
        _say(2, _target(each))
        for what, names in _orders(each):
            _say(2, f"{what} {len(names)}: {_hosts(names)}")
        if each.target is not None and (more := each.powered - each.target - len(each.chosen.power_down)) > 0:
            _say(2, f"{more} more stay on ({_STAY})")
        if each.chosen.short:
            _say(2, f"{each.chosen.short} nodes too few: almanac has no other node to wake")
        if each.quarantined:
            _say(2, f"did not wake, drained until an operator repairs them: {_hosts(each.quarantined)}")
        if outcomes:
            _show_outcome(outcomes[place])
    if outcomes is None:
        why = {"observe": ' (power.mode is "observe")', None: " (this is a plan)"}.get(mode, "")
        _say(0, f"nothing was sent to Slurm{why}")


def _show_outcome(outcome: SetOutcome) -> None:
    if outcome.changed:
        _say(2, f"left on, because no longer idle, or held: {_hosts(outcome.changed)}")
    if outcome.unheard:
        _say(2, f"Slurm dropped the order; the next run repeats it: {_hosts(outcome.unheard)}")
    for line in dict.fromkeys(outcome.said):
        click.echo(f"Slurm said: {printable(line)}", err=True)


def _orders(each: SetPlan) -> list[tuple[str, Sequence[str]]]:
    failed = each.failures
    orders = [
        ("quarantine, did not wake:", failed.give_up), ("power down again, slurmctld forgot:", failed.lost),
        ("wake again", failed.again), ("resume, up again:", failed.back),
        ("wake", each.chosen.wake), ("power down", each.chosen.power_down),
    ]  # fmt: skip
    return [(what, names) for what, names in orders if names]


def _target(each: SetPlan) -> str:
    if each.target is None:
        return f"no change: {each.reason}"
    return f"target {each.target} nodes: {each.reason}"


def _counts(demand: LiveDemand, powered: int | None = None) -> str:
    on = "" if powered is None else f", {powered} on"
    return f"{demand.total} nodes: {demand.active} in use, {demand.wanted} wanted, {demand.asleep} asleep{on}"


def _plan_json(plan: PowerPlan, outcomes: Sequence[SetOutcome] | None) -> dict[str, Any]:
    sets = []
    for place, each in enumerate(plan.sets):
        row: dict[str, Any] = {
            "node_set": each.node_set, **asdict(each.demand), "powered": each.powered, "target": each.target,
            "reason": each.reason, "hold": each.is_hold, "wake": each.chosen.wake,
            "power_down": each.chosen.power_down, "short": each.chosen.short, "wake_again": each.failures.again,
            "resume": each.failures.back, "quarantine": each.failures.give_up,
            "power_down_again": each.failures.lost, "quarantined": each.quarantined,
        }  # fmt: skip
        if outcomes:
            row |= {
                "said": outcomes[place].said,
                "left_on": outcomes[place].changed,
                "unheard": outcomes[place].unheard,
            }
        sets.append(row)
    return {"applied": outcomes is not None, "time_s": plan.now_s, "actuator": plan.actuator, "node_sets": sets}


def show_status(status: Status, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(asdict(status)))
        return
    if status.hold:
        _say(0, f"{status.hold}; no node powers down until `almanac power hold --off`")
    if status.fault:
        _say(0, f"no node powers down: {status.fault}")
    if status.mode != "apply":
        _say(0, f'power.mode is "{status.mode}": nothing is sent to Slurm')
    _say(0, f"last run: {format_moment(status.run_s) if status.run_s else 'none yet'}")
    for each in status.sets:
        _show_set(each)


def _show_set(each: SetStatus) -> None:
    _say(0, f"{each.node_set}: {_counts(each.demand)}")
    for name, reason in each.did_not_wake:
        _say(2, f"{name}: {reason}; repair it, then `almanac power wake {name}`")
    if each.asleep:
        _say(2, f"asleep: {_hosts(each.asleep)}")
    if each.asleep_by_others:
        _say(2, f"asleep, but not powered down by almanac, so left alone: {_hosts(each.asleep_by_others)}")
    _say(2, f"last 24 h: {each.wakes} wake-ups, {each.cycles} node power-downs")


def show_history(rows: Sequence[Mapping[str, Any]], total: int, as_json: bool) -> None:
    if as_json:
        click.echo(json_text(list(rows)))
        return
    if not rows:
        click.echo("no orders")
    for row in rows:
        number = row.get("number", "")
        when = format_moment(row["time_s"]) if isinstance(row.get("time_s"), int) else "at an unknown time"
        would = "" if row.get("mode") == "apply" else "would "
        head = f"{when}  {row.get('node_set', '')}  {would}{row.get('what', '')} {number}: {row.get('nodes', '')}"
        _say(0, head)
        _say(4, str(row.get("reason", "")))
    if total > len(rows):
        click.echo(f"... {total - len(rows)} older rows; -n 0 shows all")


def show_woken(woken: Woken, is_held: bool, faults: Sequence[str], as_json: bool) -> None:
    if as_json:
        click.echo(json_text({**asdict(woken), "faults": list(faults)}))
        return
    _say(0, f"powering up {len(woken.woken)} nodes" + (f": {_hosts(woken.woken)}" if woken.woken else ""))
    if woken.undrained:
        _say(0, f"quarantine ended: {_hosts(woken.undrained)}")
    if woken.late:
        _say(0, f"still powering down; run this again later: {_hosts(woken.late)}")
    if woken.left:
        _say(0, f"skipped, because unknown, or drained or down for another reason: {_hosts(woken.left)}")
    if is_held:
        _say(0, "hold: no node powers down until `almanac power hold --off`")
    for line in (*faults, *dict.fromkeys(woken.said)):
        click.echo(f"warning: {printable(line, 300)}", err=True)


def _hosts(names: Sequence[str]) -> str:
    """A host list, cut if it is long."""
    from telemetry.slurm.hostlist import fold

    text = fold(names)
    return text if len(text) <= MOST_NAMES else f"{text[:MOST_NAMES]}... (--json has all)"


def _say(indent: int, text: str) -> None:
    """A line, wrapped to 80 columns; host lists are not broken."""
    spaces = " " * indent
    lines = textwrap.wrap(
        printable(text, 2000), COLUMNS, initial_indent=spaces, subsequent_indent=spaces + "  ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    click.echo("\n".join(lines))
