"""`almanac trial`: shall a subject be switched on at this site? One line for each, with the evidence below it."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import AlmanacError, FileFormatError, RequestError
from almanac.units import did_you_mean, json_value, printable
from cli.app import App
from cli.backtest_power import read_file, read_store
from cli.output import Advance, json_text, plot_file, progress
from cli.simulate import find_cluster

if TYPE_CHECKING:
    import pandas as pd

    from advisor.trial import Affected, Gain, Losers, TrialResult, Verdict
    from simulator.traces.read import Trace
    from simulator.trial import SiteOrder, Tell

SUBJECTS = ("tiers", "priority", "power", "mig", "types", "packing", "watch")
OF_TRACES = ("priority", "power")
"""Subjects that a file of jobs, or of nodes, has data for."""
_WIDTH = 78
SHOWN_USERS = 3


@dataclass
class _TrialCall:
    """The command line, and the history, read once. tell: takes the share of a subject's work that is done."""

    app: App
    trace: Path | None
    options: dict[str, Any]
    tell: Tell

    @cached_property
    def history(self) -> pd.DataFrame:
        from telemetry.history import load_history

        return load_history(self.app.store)


@click.command("trial")
@click.argument("subjects", metavar="[SUBJECT]...", nargs=-1)
@click.option("--trace", type=click.Path(path_type=Path, exists=True, dir_okay=False), metavar="FILE",
              help="Judge this record instead of the store: jobs, as `almanac simulate` reads them, or nodes per "
              "minute.")  # fmt: skip
@click.option("--vc", default="", metavar="NAME", help="Use only rows of a file of nodes with NAME in column vc.")
@click.option("--nodes", type=click.IntRange(1, 100_000), metavar="N", help="Nodes, all alike. [those of the jobs]")
@click.option("--gpus-per-node", type=click.IntRange(1, 64), metavar="G", default=8, show_default=True,
              help="GPUs of each node, with --nodes, or in a file of nodes that counts GPUs.")  # fmt: skip
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), callback=plot_file,
              help="Also draw the gains by week. Replaces the .png, .svg, or .pdf file.")  # fmt: skip
@click.option("--names", "has_names", is_flag=True, help="Show user names instead of pseudonyms.")
@click.option("--json", "is_json", is_flag=True, help="Print the verdicts and their evidence as JSON.")
@click.pass_obj
def command(
    app: App,
    /,
    subjects: tuple[str, ...],
    trace: Path | None,
    plot: Path | None,
    has_names: bool,
    is_json: bool,
    **options: Any,
) -> None:
    """Judge whether to switch on almanac's actions at this site: switch on, do not, or not enough data. For operators.

    SUBJECT is tiers, priority, power, mig, types, packing, or watch; without one, all of them. Each replays your own
    record and compares almanac, week by week, with what the site does now and with trivial controls. It changes
    nothing.
    """
    from advisor.trial import judge

    names = _named(subjects, trace)
    if trace is None:
        if options["vc"]:
            raise click.UsageError("--vc selects from a file of nodes: add --trace FILE")
        app.require_operator("a trial reads all users' jobs")
        _ = app.store  # a store that cannot be read is no verdict
    verdicts: list[Verdict] = []
    call, shown = _TrialCall(app, trace, options, _quiet), _masked(app, trace, has_names)
    with progress("trial") as advance:
        for number, name in enumerate(names):

            def tell(share: float, note: str, number: int = number, name: str = name) -> None:
                advance((number + share) / len(names), 1, f"{name}: {note}")

            tell(0.0, "reading the record")
            call.tell = tell
            verdicts += [judge(shown(result), app.config.trial) for result in _judged(name, call)]
    if plot:
        from almanac.atomic import write_output
        from reports.replay_plots import render_trial_plot

        write_output(plot, render_trial_plot(verdicts, plot.suffix.lower().removeprefix(".")))
    if is_json:
        click.echo(json_text(json_value({"rules": app.config.trial, "verdicts": verdicts})))
        return
    for verdict in verdicts:
        for line in verdict_lines(verdict):
            click.echo(line)


def _quiet(share: float, note: str) -> None:
    """Tell nothing."""


def _masked(app: App, trace: Path | None, has_names: bool) -> Callable[[TrialResult], TrialResult]:
    """Put pseudonyms in place of users: those of the site report, or numbers from the one who loses most on."""
    from advisor.trial import with_users
    from reports.site.report import pseudonym, site_key

    def shown(result: TrialResult) -> TrialResult:
        if has_names or not result.losers.by_user:
            return result
        if trace is None:
            key = site_key(app.store.root)
            return with_users(result, lambda name: pseudonym(name, key))
        numbers = count(1)
        return with_users(result, lambda name: f"user-{next(numbers)}")

    return shown


def _named(subjects: Sequence[str], trace: Path | None) -> list[str]:
    for name in subjects:
        if name not in SUBJECTS:
            known = ", ".join(SUBJECTS)
            raise click.UsageError(f"{printable(name, 40)} is no subject; {did_you_mean(name, SUBJECTS)}use {known}")
        if trace and name not in OF_TRACES:
            raise click.UsageError(f"{name} needs a store: a trace has data for {' and '.join(OF_TRACES)}")
    if trace:
        return [_kind(trace)]
    return list(dict.fromkeys(subjects or SUBJECTS))


def _kind(trace: Path) -> str:
    """The subject that a file has data for."""
    if trace.suffix.lower() in (".parquet", ".csv") and {"active", "running_gpu_num"} & set(_columns(trace)):
        return "power"
    return "priority"


def _columns(path: Path) -> list[str]:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        if path.suffix.lower() == ".parquet":
            return list(parquet.read_schema(path).names)
        with path.open("rb") as file:
            return file.readline(1 << 16).decode("utf-8", "replace").strip().split(",")
    except (OSError, pa.ArrowException) as error:
        raise FileFormatError(f"{printable(path.name)}: cannot be read: {error}", "check the file") from error


def _judged(name: str, call: _TrialCall) -> Iterator[TrialResult]:
    """Results of a subject; what is wrong with its record is a reason for no verdict."""
    from advisor.trial import TrialResult

    runners: dict[str, Callable[[_TrialCall], Iterator[TrialResult]]] = {
        "tiers": _tiers, "priority": _priority, "power": _power, "mig": _mig, "types": _types, "packing": _packing,
        "watch": _watch,
    }  # fmt: skip
    try:
        yield from runners[name](call)
    except AlmanacError as error:
        if call.trace:
            raise
        yield TrialResult(name, lacking=f"{error}; {error.hint}")


def _tiers(call: _TrialCall) -> Iterator[TrialResult]:
    from advisor.memory.backtest import trial_tiers

    yield trial_tiers(call.history, call.app.config)


def _types(call: _TrialCall) -> Iterator[TrialResult]:
    from advisor.types.backtest import trial_types
    from advisor.types.runs import load_speed_runs

    yield trial_types(load_speed_runs(call.app.store), call.app.config)


def _packing(call: _TrialCall) -> Iterator[TrialResult]:
    from advisor.packing.backtest import trial_packing
    from telemetry.history import load_history

    yield trial_packing(load_history(call.app.store, running=True), call.app.config)


def _watch(call: _TrialCall) -> Iterator[TrialResult]:
    from advisor.watch.backtest import trial_watch

    yield trial_watch(call.app.store, call.app.config)


def _mig(call: _TrialCall) -> Iterator[TrialResult]:
    from simulator.trial import mig_trial

    yield mig_trial(call.history, call.app.config, call.tell)


def _priority(call: _TrialCall) -> Iterator[TrialResult]:
    from simulator.traces.read import stored_trace
    from simulator.trial import priority_trial

    trace, note = _jobs_of(call.trace, call.app) if call.trace else (stored_trace(call.app.store), "")
    cluster = find_cluster(trace, {**call.options, "cluster_file": None})
    processes = len(os.sched_getaffinity(0))
    found = priority_trial(trace.workload, cluster, _order(call), call.app.config, call.tell, processes)
    yield dataclasses.replace(found, notes=(*found.notes, *([note] if note else [])))


def _jobs_of(path: Path, app: App) -> tuple[Trace, str]:
    """The jobs of a file; if it has none, CPUs stand for GPUs."""
    from simulator.traces.read import TraceOptions, open_trace

    try:
        return open_trace(path, TraceOptions(app.config.tiers)), ""
    except RequestError as error:
        if "without a GPU" not in str(error):
            raise
        return open_trace(path, TraceOptions(app.config.tiers, are_cpus_gpus=True)), "no GPUs in the file: CPUs count"


def _order(call: _TrialCall) -> SiteOrder:
    from simulator.trial import site_order

    if call.trace:
        return site_order(None)
    try:
        return site_order(call.app.backend.settings())
    except AlmanacError:
        return site_order(None)


def _power(call: _TrialCall) -> Iterator[TrialResult]:
    from advisor.power.forecast import load_holidays
    from simulator.trial import power_trial

    config = call.app.config
    options = {"vc": call.options["vc"], "endtime": None, "gpus_per_node": call.options["gpus_per_node"]}
    names = [""] if call.trace else [each.name for each in config.node_sets] or [""]
    for name in names:
        asked = {**options, "set_name": name}
        record = read_file(call.trace, asked) if call.trace else read_store(call.app, asked, _advance(call.tell))
        found = power_trial(record.series, record.runs, config, load_holidays(config.power.holidays), call.tell)
        yield dataclasses.replace(found, subject=f"power {record.node_set or ''}".strip())


def _advance(tell: Tell) -> Advance:
    return lambda done, total, note="": tell(done / max(1, total), note)


def verdict_lines(verdict: Verdict) -> list[str]:
    """The verdict in one line, then why, the gains, who loses, and the lines to paste."""
    from advisor.trial import SWITCH_ON

    result = verdict.result
    days = f" (needs {verdict.needed_days} more days)" if verdict.needed_days else ""
    parts: list[tuple[str, str]] = [("why", verdict.reason)]
    if result.gains:
        gains = result.gains
        weeks = f"{len(gains.starts_s)} weeks" + (f", {gains.lost_weeks} left out" if gains.lost_weeks else "")
        parts.append(("gain", f"{gain_with_interval(gains.site)} over {gains.site.over}"))
        parts.append(("", f"{gain_with_interval(gains.best_control)} over {gains.best_control.over}, the best control"))
        parts.append(("", f"in {gains.measure}, by {weeks}"))
        losers = result.losers
        typical = f", by {losers.how_much}" if losers.how_much else ""
        parts.append(("loses", f"{losers.share:.0%} {losers.who}{typical}"))
        parts += [("", text) for text in _losers_text(losers)]
    parts += [("note", note) for note in result.notes]
    if verdict.answer == SWITCH_ON:
        parts += [("paste" if not number else "", line) for number, line in enumerate(result.settings)]
    lines = [click.style(f"{result.subject}: {verdict.answer}{days}", bold=True)]
    for name, text in parts:
        lines += _wrapped(name, printable(text, 1000))
    return lines


def _losers_text(losers: Losers) -> Iterator[str]:
    """The users who lose most, and what each size of jobs gains or loses."""
    from advisor.trial import amount_text

    def said(each: Affected) -> str:
        what = "gains" if each.gain > 0 else "loses"
        return f"{each.name} {what} {amount_text(abs(each.gain), losers.unit)} a job ({each.jobs:,} jobs)"

    if worst := [each for each in losers.by_user if each.is_worse][:SHOWN_USERS]:
        yield f"most: {'; '.join(map(said, worst))}"
    if any(each.gain for each in losers.by_size):
        yield f"by size: {'; '.join(map(said, losers.by_size))}"


def _wrapped(name: str, text: str) -> list[str]:
    import textwrap

    found = textwrap.wrap(text, _WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return [f"  {name if not number else '':6}{line}" for number, line in enumerate(found)]


def gain_with_interval(gain: Gain) -> str:
    """The gain in its unit, as a share, and with its interval: 0.12 (6%; 95%: 0.02 to 0.2)."""
    share = "" if math.isnan(gain.share) else f"{gain.share:.1%}; "
    ends = "no interval" if math.isnan(gain.low) else f"95%: {gain.low:.3g} to {gain.high:.3g}"
    return f"{gain.mean:.3g} ({share}{ends})"
