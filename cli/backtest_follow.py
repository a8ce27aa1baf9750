"""The part of `almanac backtest tier` that simulates users who follow the advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count
from cli.app import App
from cli.output import json_text, progress, show_table
from cli.simulate_output import plain, short_time, show_left_out
from telemetry.store.cluster_store import ClusterStore

if TYPE_CHECKING:
    import pandas as pd

    from simulator.tier import FollowedAdvice, TierWaits

_MOST_NODES = 100_000


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


def show_followed(
    app: App, store: ClusterStore, history: pd.DataFrame, outcomes: pd.DataFrame, share: float,
    nodes: Mapping[str, int], gpus: int, seed: int, is_json: bool,
) -> None:  # fmt: skip
    """Simulate the recorded jobs, and the jobs of a share of users who follow the advice; print both waits."""
    from simulator.tier import advice_of_jobs, ask_for_tiers, compare_waits, follow_advice, tier_cluster
    from simulator.traces.read import stored_trace

    with progress("simulate") as advance:
        advance(0, 1, "")
        cluster = tier_cluster(nodes, gpus)
        recorded = ask_for_tiers(stored_trace(store).workload, cluster)
        followed = follow_advice(recorded, advice_of_jobs(recorded, history, outcomes), share, seed)
        waits = compare_waits(recorded, followed, cluster, app.config)
    counts = _counts(followed)
    if is_json:
        shown = {"cluster": store.cluster, "follow": share, "nodes": dict(nodes), "jobs": len(recorded), **counts}
        click.echo(json_text({**shown, "waits": [_plain_waits(each) for each in waits]}))
        return
    where = ", ".join(f"{format_count(count)} nodes of {name}" for name, count in nodes.items())
    click.echo(f"{store.cluster}: {share:.0%} of the users follow the advice")
    click.echo(f"  simulated: {format_count(len(recorded))} jobs on {where}")
    show_left_out(recorded.excluded, {}, [])
    if lost := len(recorded) - (waits[0].jobs if waits else 0):
        click.echo(f"  not compared: {format_count(lost)} jobs that do not fit on these nodes")
    click.echo(
        f"  moved to a smaller tier: {format_count(counts['down'])}, to a larger one: {format_count(counts['up'])}"
    )
    click.echo(f"  moved from no tier to one: {format_count(counts['named'])}")
    click.echo(f"  ran out of memory: {format_count(counts['out_of_memory'])} of the moved jobs")
    click.echo(f"  unknown memory requirement: {format_count(counts['unknown_need'])} of the moved jobs")
    _show(waits)


def _counts(followed: FollowedAdvice) -> dict[str, int]:
    moved = Counter(followed.moved.tolist())
    return {
        **{name: moved[name] for name in ("down", "up", "named")},
        "out_of_memory": int(followed.is_out_of_memory.sum()),
        "unknown_need": int(followed.is_need_unknown.sum()),
    }


def _plain_waits(waits: TierWaits) -> dict[str, Any]:
    return {key: plain(value) for key, value in asdict(waits).items()}


def _show(waits: Sequence[TierWaits]) -> None:
    columns = ["tier asked for", "jobs", "wait", "p95", "longest", "with advice", "p95", "longest"]
    rows = [
        [
            each.group, format_count(each.jobs),
            *(
                short_time(value)
                for side in (each.recorded_s, each.followed_s)
                for value in (side.mean, side.p95, side.maximum)
            ),
        ]
        for each in waits
    ]  # fmt: skip
    show_table(columns, rows, right=columns[1:])
