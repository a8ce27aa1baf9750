"""`almanac backtest` and `almanac evaluate`: compare what almanac would have advised with what happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from almanac.submit_config import MIN_TYPE_GAIN
from almanac.units import format_count, format_duration, number_text
from cli.app import App
from cli.backtest_power import power
from cli.output import (
    BacktestResult,
    ScoreTable,
    left_out,
    plot_file,
    progress,
    short_time,
)
from cli.waits import backtest as waits

if TYPE_CHECKING:
    import pandas as pd

    from advisor.backtest import MethodComparison, Rate, Scores
    from advisor.duration.backtest import Evaluation
    from advisor.memory.backtest import TierScores
    from advisor.memory.calibration import Calibration
    from advisor.types.backtest import AdviceScores, TypeScores
    from simulator.memory import TierWaits
    from telemetry.store.store import ClusterStore


_MOST_NODES = 100_000
_OPERATORS = "a back-test reads all users' jobs"
json_option = click.option("--json", "as_json", is_flag=True, help="Print the scores as JSON.")


@click.group("backtest")
def command() -> None:
    """Replay the site's past jobs, each with what was known at its submission."""


command.add_command(power)
command.add_command(waits)


@command.command("tier")
@json_option
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), callback=plot_file,
              help="Also draw the scores. Replaces the .png, .svg, or .pdf file.")  # fmt: skip
@click.option("--follow", type=click.FloatRange(0, 1), metavar="SHARE",
              help="Simulate that this share of the users follows the advice, and compare the waits.")  # fmt: skip
@click.option("--tier-nodes", multiple=True, metavar="TIER=N",
              help="Nodes of a tier in the simulation. Repeat it for each tier.")  # fmt: skip
@click.option("--gpus-per-node", type=click.IntRange(1, 64), metavar="G", default=8, show_default=True,
              help="GPUs of each simulated node.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True,
              help="Chooses the users who follow the advice.")  # fmt: skip
@click.pass_obj
def tier(
    app: App, as_json: bool, plot: Path | None, follow: float | None, tier_nodes: tuple[str, ...],
    gpus_per_node: int, seed: int,
) -> None:  # fmt: skip
    """Score the memory advice: how many jobs would have needed more than it said? For operators.

    The rates cover advised jobs with a measured peak; a job array counts once. The 95% intervals come from a bootstrap
    over users. The accepted risk is advice.risk.

    With --follow, simulate the jobs twice instead: as recorded, and as users submit them who follow the advice.
    """
    from advisor.artefacts import load
    from advisor.memory.backtest import compare_freed, replay_tiers, score_tiers
    from telemetry.history import load_history

    nodes = read_tier_nodes(tier_nodes, [each.name for each in app.config.tiers])
    if (follow is None) != (not nodes):
        raise click.UsageError("--follow and --tier-nodes need each other")
    if follow is not None and plot:
        raise click.UsageError("--plot draws the scores, and --follow does not compute them")
    app.require_operator(_OPERATORS)
    store = app.store
    history = load_history(store)
    with progress("backtest") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        outcomes = replay_tiers(history, app.config)
        if follow is None:
            compared = compare_freed(outcomes)
            trained = load(store.models_dir)
            learned = trained.calibration if trained else None
            result = _tier_result(store.cluster, app.config.advice.risk, learned, score_tiers(outcomes), compared)
        else:
            result = _followed_result(app, store, history, outcomes, follow, nodes, gpus_per_node, seed)
    result.show(as_json, plot)


def _tier_result(
    cluster: str, risk: float, learned: Calibration | None, scores: list[TierScores], compared: MethodComparison
) -> BacktestResult:
    """learned: at the last training, which measured the risk; None before the first."""

    def picture(kind: str) -> bytes:
        from reports.replay_plots import render_tier_plot

        return render_tier_plot(cluster, risk, scores, kind)

    table = ScoreTable(
        (
            ("group", lambda each: each.group),
            ("jobs", lambda each: format_count(each.jobs)),
            ("advised", lambda each: format_count(each.advised)),
            ("down", lambda each: format_count(each.moved_down)),
            ("up", lambda each: format_count(each.moved_up)),
            ("above bound", lambda each: number_text(each.exceeded_bound.share, ".2%")),
            ("95%", lambda each: _interval(each.exceeded_bound)),
            ("above tier", lambda each: number_text(each.exceeded_tier.share, ".2%")),
            ("95%", lambda each: _interval(each.exceeded_tier)),
            ("GPU-h freed", lambda each: format_count(round(each.freed_gpu_hours))),
        ),
        scores,
    )
    facts = {"cluster": cluster, "risk": risk, "measured_risk": learned and learned.measured, "groups": scores}
    said = learned.told_risk(risk) if learned else f"{risk:.2%}"
    return BacktestResult(facts, [f"{cluster}: accepted risk {said}", table], compared, picture)


def _interval(rate: Rate) -> str:
    return f"{rate.low:.2%}-{rate.high:.2%}" if rate.jobs else ""


def read_tier_nodes(texts: Sequence[str], tiers: Sequence[str]) -> dict[str, int]:
    """Nodes by tier, of texts such as hbm40g=16. Raises click.BadParameter for anything else."""
    nodes: dict[str, int] = {}
    for text in texts:
        name, _, count = text.partition("=")
        if name not in tiers:
            raise click.BadParameter(f"{text!r} names no tier; use {', '.join(tiers)}", param_hint="--tier-nodes")
        if not (count.isascii() and count.isdigit() and 0 < int(count[:9]) <= _MOST_NODES):
            raise click.BadParameter(
                f"{text!r} has no number of nodes from 1 to {_MOST_NODES}", param_hint="--tier-nodes"
            )
        nodes[name] = int(count)
    return nodes


def _followed_result(
    app: App, store: ClusterStore, history: pd.DataFrame, outcomes: pd.DataFrame, share: float,
    nodes: Mapping[str, int], gpus: int, seed: int,
) -> BacktestResult:  # fmt: skip
    """Simulate the recorded jobs, and the jobs of a share of users who follow the advice; compare the waits."""
    from simulator.memory import advice_of_jobs, ask_for_tiers, compare_waits, follow_advice, tier_cluster
    from simulator.traces.read import stored_trace

    cluster = tier_cluster(nodes, gpus)
    recorded = ask_for_tiers(stored_trace(store).workload, cluster)
    followed = follow_advice(recorded, advice_of_jobs(recorded, history, outcomes), share, seed)
    waits = compare_waits(recorded, followed, cluster, app.config)
    counts = {name: int((followed.moved == name).sum()) for name in ("down", "up", "named")}
    counts |= {
        "out_of_memory": int(followed.is_out_of_memory.sum()),
        "unknown_need": int(followed.is_need_unknown.sum()),
    }
    facts = {"cluster": store.cluster, "follow": share, "nodes": nodes, "jobs": len(recorded), **counts, "waits": waits}
    where = ", ".join(f"{format_count(count)} nodes of {name}" for name, count in nodes.items())
    lost = len(recorded) - (waits[0].jobs if waits else 0)
    text = [
        f"{store.cluster}: {share:.0%} of the users follow the advice",
        f"  simulated: {format_count(len(recorded))} jobs on {where}",
        *left_out(recorded.excluded, {}, []),
        *([f"  not compared: {format_count(lost)} jobs that do not fit on these nodes"] if lost else []),
        f"  moved to a smaller tier: {format_count(counts['down'])}, to a larger one: {format_count(counts['up'])}",
        f"  moved from no tier to one: {format_count(counts['named'])}",
        f"  ran out of memory: {format_count(counts['out_of_memory'])} of the moved jobs",
        f"  unknown memory requirement: {format_count(counts['unknown_need'])} of the moved jobs",
    ]
    return BacktestResult(facts, [*text, _waits_table(waits)])


def _waits_table(waits: Sequence[TierWaits]) -> ScoreTable:
    return ScoreTable(
        (
            ("tier asked for", lambda each: each.group),
            ("jobs", lambda each: format_count(each.jobs)),
            ("wait", lambda each: short_time(each.recorded_s.mean)),
            ("p95", lambda each: short_time(each.recorded_s.p95)),
            ("longest", lambda each: short_time(each.recorded_s.maximum)),
            ("with advice", lambda each: short_time(each.followed_s.mean)),
            ("p95", lambda each: short_time(each.followed_s.p95)),
            ("longest", lambda each: short_time(each.followed_s.maximum)),
        ),
        waits,
    )


@command.command("type")
@click.option("--last", type=click.IntRange(1, 1_000_000), metavar="N", default=5000, show_default=True,
              help="Score the newest N jobs. All earlier jobs are history.")  # fmt: skip
@json_option
@click.pass_obj
def gpu_type(app: App, last: int, as_json: bool) -> None:
    """Score the predicted run times on GPU types, and the choice of a type by wait plus run time. For operators.

    Scores jobs of families that ran on at least two GPU types, each with what was known at its submission. The
    choice is that of `almanac advise`. The waits come from the record's own queues at that time. The error is the
    median of |ln(predicted / actual)|.
    """
    from advisor.types.backtest import compare_times, replay_types, score_advice, score_types
    from advisor.types.runs import load_speed_runs

    app.require_operator(_OPERATORS)
    jobs = load_speed_runs(app.store)
    with progress("backtest") as advance:
        advance(0, 1, f"{format_count(len(jobs))} jobs")
        outcomes = replay_types(jobs, app.config, last)
    compared = compare_times(outcomes)
    _type_result(app.store.cluster, score_types(outcomes), score_advice(outcomes), compared).show(as_json)


def _type_result(
    cluster: str, scores: list[TypeScores], advice: AdviceScores, compared: MethodComparison
) -> BacktestResult:
    from advisor.duration.blend import COVERAGE

    facts = {
        "cluster": cluster, "coverage": COVERAGE, "min_gain": MIN_TYPE_GAIN, "groups": scores, "advice": advice,
    }  # fmt: skip
    title = f"{cluster}: {format_count(advice.jobs)} jobs of families that ran on two or more GPU types"
    if not advice.jobs:
        return BacktestResult(facts, [title, "nothing to score: no job family has runs on two GPU types"])
    table = ScoreTable(
        (
            ("run time on the type used", lambda each: each.group),
            ("jobs", lambda each: format_count(each.jobs)),
            ("completed", lambda each: format_count(each.completed)),
            ("predicted", lambda each: format_count(each.predicted)),
            ("error", lambda each: number_text(each.error, ".2f")),
            (f"in {COVERAGE:.0%}", lambda each: number_text(each.coverage, ".0%")),
        ),
        scores,
    )
    gain = f"another type must save {MIN_TYPE_GAIN:.0%} of the time until the end"
    text = [f"\nadvice, as at submission ({gain})"]
    for name, number in (("another type", advice.other), ("the type used", advice.kept), ("silent", advice.silent)):
        text.append(f"  {name:14} {format_count(number):>8}  {number / advice.jobs:5.1%}")
    if advice.wait_error_s is not None:
        text.append(f"  expected wait on the type used: median error {format_duration(advice.wait_error_s)}")
    if advice.median_won_hours is not None:
        won = f"{advice.won_hours:,.0f} h in all, median {advice.median_won_hours:.1f} h a job"
        text.append(f"  estimated time won: {won}")
        text.append("  This assumes the predicted waits and run times, and that nobody else follows.")
    return BacktestResult(facts, [title, table, *text], compared)


DURATION_TABLES = {
    "all": "all jobs, predicted by",
    "users": "median over users, predicted by",
    "warm": "jobs of known users, predicted by",
    "cold": "jobs of new users, predicted by",
}


@click.command("evaluate")
@click.option("--share", default=0.4, show_default=True, type=click.FloatRange(0.05, 0.9),
              help="Share of the jobs to predict, the newest ones.")  # fmt: skip
@json_option
@click.pass_obj
def evaluate(app: App, share: float, as_json: bool) -> None:
    """Predict the newest jobs in order of submission, and compare the scores with simple baselines. For operators.

    The replay retrains the models every training.retrain_hours on the jobs that had ended by then. It predicts each job
    from what was known at its submission. It writes nothing.
    """
    from advisor.duration.backtest import evaluate as replay
    from telemetry.history import load_history

    app.require_operator("an evaluation reads all users' jobs")
    history = load_history(app.store, running=True)
    with progress("evaluate") as advance:
        advance(0, 1, f"{format_count(len(history))} jobs")
        result = replay(history, app.config, share)
    _duration_result(app.store.cluster, result).show(as_json)


def _duration_result(cluster: str, result: Evaluation) -> BacktestResult:
    from advisor.duration.blend import COVERAGE

    facts = {"cluster": cluster, **vars(result)}
    if result.since_s is None:
        return BacktestResult(facts, [f"{cluster}: no job has ended yet, so there is nothing to predict"])
    since = datetime.fromtimestamp(result.since_s, UTC).strftime("%Y-%m-%d %H:%M")
    trainings = format_count(result.trainings)
    text = [f"{format_count(result.jobs)} GPU jobs of {cluster} since {since} UTC, {trainings} trainings"]
    tables = [
        duration_table(title, scores, "users" if name == "users" else "jobs")
        for name, title in DURATION_TABLES.items()
        if (scores := getattr(result, name))
    ]
    closing = []
    if result.coverage is not None:
        shares = ", ".join(f"{share:.0%}" for share in result.coverage_by_quarter)
        goal = f"goal: {COVERAGE:.0%}{f'; by quarter, oldest first: {shares}' if shares else ''}"
        closing = [
            f"{result.coverage:.0%} of jobs ended within their predicted interval ({goal})",
            f"{result.told:.0%} of the intervals are narrow enough to show",
        ]
    return BacktestResult(facts, [*text, *tables, *closing], result.comparison)


def duration_table(title: str, scores: Mapping[str, Scores], counted: str = "jobs") -> ScoreTable:
    """The scores by predictor, with almanac's own first."""
    from advisor.duration.backtest import OURS

    names = sorted(scores, key=lambda name: (OURS.index(name) if name in OURS else len(OURS), name))
    return ScoreTable(
        (
            (title, lambda each: each[0]),
            (counted, lambda each: format_count(each[1].jobs)),
            ("Spearman", lambda each: number_text(each[1].spearman, ".3f")),
            ("of GPU-time", lambda each: number_text(each[1].gpu_time_spearman, ".3f")),
            ("median |log error|", lambda each: number_text(each[1].median_abs_log_error, ".3f")),
            ("within 2x", lambda each: number_text(each[1].share_within_2x, ".3f")),
        ),
        [(name, scores[name]) for name in names],
    )
