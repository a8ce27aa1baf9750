"""Tables and JSON of `almanac simulate`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from almanac.units import DAY_S, HOUR_S, format_count, printable
from cli.output import show_table

if TYPE_CHECKING:
    from simulator.cluster import Cluster
    from simulator.outcomes.scores import GroupScores, Interval, PolicyRun, PolicyScores
    from simulator.workload import Workload

_NAMED = 5


def short_time(seconds: float) -> str:
    """Three digits and one unit, so that eight columns fit a terminal: "12.3 h". "-" for NaN."""
    if math.isnan(seconds):
        return "-"
    size = abs(seconds)
    for limit, unit_s, unit in (
        (59.5, 1, "s"),
        (HOUR_S - 30, 60, "min"),
        (2 * DAY_S, HOUR_S, "h"),
        (math.inf, DAY_S, "d"),
    ):
        if size < limit:
            value = seconds / unit_s
            return f"{value:.0f} {unit}" if unit in ("s", "min") or abs(value) >= 99.95 else f"{value:.1f} {unit}"
    raise AssertionError(seconds)


def show_scores(excluded: Mapping[str, int], ignored: Mapping[str, int], scores: Sequence[PolicyScores]) -> None:
    show_left_out(excluded, ignored, scores)
    scores = with_mean_draws(scores)
    _show_groups("", [(score, score.all_jobs) for score in scores])
    for length in scores[0].by["length"]:
        groups = [(score, score.by["length"][length]) for score in scores]
        if groups[0][1].jobs:
            _show_groups(f"\n{length}: {format_count(groups[0][1].jobs)} jobs", groups)
    if len(scores) > 1:
        _show_comparison(f"\nagainst {printable(scores[0].policy, 40)}", scores)


def with_mean_draws(scores: Sequence[PolicyScores]) -> list[PolicyScores]:
    """One row for all random draws of a control, with the mean of each figure."""
    from simulator.comparison import draws_name, draws_of
    from simulator.outcomes.scores import mean_of_draws

    by_policy = {score.policy: score for score in scores}
    rows = []
    for draws in draws_of(list(by_policy)):
        mean = mean_of_draws([by_policy[draw] for draw in draws], f"{len(draws)} x {draws_name(draws[0])}")
        rows.append(mean if len(draws) > 1 else by_policy[draws[0]])
    return rows


def show_left_out(excluded: Mapping[str, int], ignored: Mapping[str, int], scores: Sequence[PolicyScores]) -> None:
    """Jobs and constraints that were not simulated, and jobs that never ended."""
    for reason, count in excluded.items():
        click.echo(f"  excluded: {format_count(count)} {printable(reason)}")
    for text, count in sorted(ignored.items(), key=lambda each: -each[1])[:_NAMED]:
        click.echo(f"  ignored: constraint {printable(text, 60)} of {format_count(count)} jobs; no such nodes")
    said: dict[str, list[str]] = {}
    for score in scores:
        for text in _unfinished(score):
            said.setdefault(text, []).append(score.policy)
    for text, policies in said.items():
        names = [""] if len(policies) == len(scores) else [f"{printable(policy, 40)}: " for policy in policies]
        for name in names:
            click.echo(f"  {name}{text}")


def _unfinished(score: PolicyScores) -> list[str]:
    texts = [f"{format_count(count)} jobs never ended: they {reason}" for reason, count in score.unfinished.items()]
    if score.all_jobs.canceled:
        texts.append(f"{format_count(score.all_jobs.canceled)} jobs canceled in the queue")
    return texts


def _show_groups(title: str, rows: Sequence[tuple[PolicyScores, GroupScores]]) -> None:
    """JCT: job completion time, a mean. `used` is of the whole cluster and only in the first table."""
    base = rows[0][1].jct_s.mean
    columns = ["policy", "JCT", "vs first", "delay", "p95", "max", "queued", *([] if title else ["used"])]
    cells = [
        [
            score.policy, short_time(group.jct_s.mean), ratio_text(group.jct_s.mean, base),
            *map(short_time, (group.delay_s.mean, group.delay_s.p95, group.delay_s.maximum)),
            format_count(group.queued),
            *([] if title else [share_text(score.utilization)]),
        ]
        for score, group in rows
    ]  # fmt: skip
    click.echo(title or "", nl=bool(title))
    show_table(columns, cells, right=columns[1:])


def _show_comparison(title: str, scores: Sequence[PolicyScores]) -> None:
    """Differences of mean JCT. The first policy has none."""
    columns = ["policy", "JCT", "95%", "users worse off", "fairness"]
    cells = []
    for place, score in enumerate(scores):
        pair = score.against_first
        against = [*_interval(pair.jct_difference_s), share_text(pair.worse_users)] if place else ["-", "-", "-"]
        cells.append([score.policy, *against, "-" if math.isnan(score.jain) else f"{score.jain:.2f}"])
    click.echo(title)
    show_table(columns, cells, right=columns[1:])


def _interval(interval: Interval) -> tuple[str, str]:
    if math.isnan(interval.low):
        return short_time(interval.mean), "-"
    return short_time(interval.mean), f"{short_time(interval.low)} to {short_time(interval.high)}"


def ratio_text(value: float, base: float) -> str:
    return "-" if math.isnan(value) or not base > 0 else f"{value / base:.2f}"


def share_text(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"


def as_json(
    name: str,
    workload: Workload,
    cluster: Cluster,
    first: int,
    ignored: Mapping[str, int],
    scores: Sequence[PolicyScores],
    runs: Sequence[PolicyRun],
) -> dict[str, Any]:
    """Times in seconds. NaN is not JSON: null stands for it."""
    return {
        "trace": name,
        "jobs": len(workload),
        "scored_jobs": len(workload) - first,
        "excluded": dict(workload.excluded),
        "ignored_constraints": dict(ignored),
        "nodes": cluster.node_count,
        "gpus": cluster.gpu_count,
        "policies": [
            {**plain(dataclasses.asdict(score)), "timeline": _timeline(run)}
            for score, run in zip(scores, runs, strict=True)
        ],
    }


def _timeline(run: PolicyRun) -> dict[str, Any]:
    """Means of bins that start at start_s."""
    line = run.timeline
    return {
        "start_s": [round(edge) for edge in line.edges_s[:-1].tolist()],
        "end_s": round(float(line.edges_s[-1])),
        **{
            name: [round(value, 3) for value in getattr(line, name).tolist()]
            for name in ("busy_gpus", "fragmented_gpus", "waiting_jobs")
        },
    }


def plain(value: Any) -> Any:
    """NaN is not JSON: None stands for it."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
