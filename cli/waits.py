"""`almanac waits`: how long a job would wait now, by GPU type and number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.published.outgoing import outgoing_of
from almanac.units import counted, format_count, format_duration, number_text, printable
from cli.app import App
from cli.output import BacktestResult, ScoreTable, json_text, show_table
from cli.root_part import hand_out, leave_root

if TYPE_CHECKING:
    from advisor.types.decide import TypeWait
    from advisor.waits.backtest import WaitReplay
    from slurm_hooks.advice.type_files import GatheredWaits


@click.command("waits")
@click.option("--publish", "is_published", is_flag=True, help="Write the waits file that submit hosts read.")
@click.option("--json", "as_json", is_flag=True, help="Print the waits as JSON.")
@click.pass_obj
def command(app: App, is_published: bool, as_json: bool) -> None:
    """Predict how long a job would wait now, by GPU type and number of GPUs. For operators, and a timer.

    A wait is predicted to be in the middle half of the newest 50 waits of such jobs that were submitted in the same
    state of Slurm's queue: while another such job waited, or while none did. Where such predictions did not hold lately
    (`almanac backtest waits`), nothing is predicted. With --publish, writes one small file that anyone can read. It
    holds totals only, and advice uses it for 10 minutes.

    The choice between GPU types uses the queue played forward instead (`for_the_choice` in --json): it tells which type
    starts first, but its times are off.
    """
    app.require_operator("the queue holds all users' jobs")
    target = Path(app.config.hooks.advice_dir).absolute()

    def give(cluster: str | None = app.cluster_name) -> None:
        if is_published:
            hand_out(app.config, app.store_root, cluster, target, is_quiet=True)

    is_child = leave_root(app.store_root, give)
    # Late: root loads no library before it has become the store's owner.
    from slurm_hooks.advice.type_files import publish_waits, waits_now

    found = waits_now(app)
    if is_published:
        publish_waits(outgoing_of(app.store.root, app.store.cluster), found.file)
        if not is_child:
            give(app.cluster)
    if as_json:
        click.echo(json_text(_as_json(found)))
    else:
        _show(found, is_published)


def _show(found: GatheredWaits, is_published: bool) -> None:
    columns = ["type", "GPUs", "wait", "low", "high"]
    cells = [
        [wait.gpu_type, str(size), *(format_duration(each) for each in (wait.wait_s, wait.low_s, wait.high_s))]
        for size, wait in found.file.told
    ]
    show_table(columns, cells, right=columns[1:])
    click.echo(f"{format_count(found.running)} running and {format_count(found.waiting)} waiting GPU jobs")
    if found.silent:
        named = ", ".join(f"{name} {counted(size, 'GPU')}" for name, size in found.silent)
        click.echo(f"not predicted, because too few recent predictions held: {named}")
    if found.unreadable:
        click.echo(f"  {format_count(found.unreadable)} records of the queue cannot be read")
    click.echo("waits file written" if is_published else "nothing was written; use --publish")


def _as_json(found: GatheredWaits) -> dict[str, Any]:
    return {
        "as_of_s": found.file.as_of_s,
        "waits": _rows(found.file.told),
        "for_the_choice": _rows(found.file.waits),
        "running": found.running,
        "waiting": found.waiting,
        "silent": [{"type": name, "gpus": size} for name, size in found.silent],
        "unreadable": found.unreadable,
    }


def _rows(waits: Sequence[tuple[int, TypeWait]]) -> list[dict[str, Any]]:
    return [
        {"type": wait.gpu_type, "gpus": size, "wait_s": wait.wait_s, "low_s": wait.low_s, "high_s": wait.high_s}
        for size, wait in waits
    ]


@click.command("waits")
@click.option("--from", "since", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE", default=0.4,
              show_default=True, help="Share of the jobs, the oldest ones, that are not scored.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")
@click.pass_obj
def backtest(app: App, since: float, as_json: bool) -> None:
    """Score the predicted waits, by tier or GPU type and number of GPUs. For operators.

    A job's wait is predicted to be in the middle half of the newest waits known at its submission, of jobs submitted in
    the same state of the queue, so half of the jobs should be inside. A wait is predicted on days on which such
    predictions have held lately ("spoken"); the scores are of these.
    """
    from advisor.waits.backtest import replay_waits
    from telemetry.history import load_history

    app.require_operator("a back-test reads all users' jobs")
    history = load_history(app.store, running=True)
    names = history["tier"].fillna(history["gpu_type"]).fillna("")
    _replay_result(app.store.cluster, replay_waits(history, names, since)).show(as_json)


def _replay_result(cluster: str, found: WaitReplay) -> BacktestResult:
    table = ScoreTable(
        (
            ("waits", lambda each: printable(each.group, 40)),
            ("jobs", lambda each: format_count(each.jobs)),
            ("spoken", lambda each: format_count(each.spoken)),
            ("inside", lambda each: number_text(each.coverage, ".0%")),
            ("width, s", lambda each: number_text(each.width_s, ",.0f")),
            ("pinball loss, s", lambda each: number_text(each.pinball_s, ",.0f")),
        ),
        found.groups,
    )
    gains = found.gains
    said = f"gains said at the start of a week: {format_count(gains.said)}"
    if gains.jobs:
        said += f"; {gains.did:.0%} of {format_count(gains.jobs)} jobs of the week started as much earlier (goal: half)"
    facts = {"cluster": cluster, "groups": found.groups, "gains": gains}
    return BacktestResult(facts, [f"{cluster}: half of the jobs should be inside", table, said], found.comparison)
