"""`almanac backtest priority`: the store's own jobs under the order that almanac sets, and under others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count, printable
from cli.app import App
from cli.output import json_text, progress, show_table
from cli.simulate import find_cluster, scored_part
from cli.simulate_output import as_json, ratio_text, share_text, short_time, show_left_out, with_mean_draws

if TYPE_CHECKING:
    from simulator.outcomes.scores import PolicyScores

POLICIES = (
    "fifo+easy", "multifactor+easy", "qssf-aged+easy",
    "gpu-count+easy", *(f"qssf-shuffled:seed={seed}+easy" for seed in range(5)),
)  # fmt: skip
"""The last six are controls: an order by GPU count, and shuffled predictions."""
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("priority")
@click.option("--nodes", type=click.IntRange(1, 100_000), metavar="N", help="Nodes, all alike. [those of the jobs]")
@click.option("--gpus-per-node", type=click.IntRange(1, 64), metavar="G", default=8, show_default=True,
              help="GPUs of each node, with --nodes.")  # fmt: skip
@click.option(
    "--cluster-file", type=_FILE, metavar="FILE", help="Node sets and partitions in TOML, instead of --nodes."
)
@click.option("--from", "skipped", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE", default=0.4,
              show_default=True, help="Share of the jobs, the oldest ones, that only the predictor sees.")  # fmt: skip
@click.option("--jobs", "processes", type=click.IntRange(1, 256), metavar="N",
              help="Policies to simulate at once, each in its own process. [the number of cores]")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print all scores as JSON.")
@click.pass_obj
def priority(app: App, /, is_json: bool, **options: Any) -> None:
    """Simulate the past jobs in the order of the site factor, and in others. For operators.

    The order of the site factor (qssf-aged) uses the settings of [priority]. FIFO, Slurm's multifactor priority, and
    controls stand beside it, all with EASY backfill on the requested time limits.
    """
    from simulator.comparison import run_policies
    from simulator.outcomes.scores import score_runs
    from simulator.traces.read import stored_trace

    app.require_operator("a back-test reads all users' jobs")
    trace = stored_trace(app.cluster_store())
    cluster = find_cluster(trace, options)
    workload, first, ignored = scored_part(trace.workload, cluster, options["skipped"], 0.0)
    processes = options["processes"] or len(os.sched_getaffinity(0))
    with progress("backtest") as advance:
        runs = run_policies(
            workload, cluster, POLICIES, app.config, first=first, processes=processes,
            advance=lambda share, policy: advance(share, 1, policy),
        )  # fmt: skip
    scores = score_runs(workload, runs, first)
    if is_json:
        click.echo(json_text(as_json(trace.name, workload, cluster, first, ignored, scores, runs)))
        return
    click.echo(
        f"{printable(trace.name)}: {format_count(len(workload))} jobs on {format_count(cluster.node_count)} nodes with "
        f"{format_count(cluster.gpu_count)} GPUs"
    )
    click.echo("all orders with EASY backfill; worse off: share of users with a longer mean JCT")
    show_left_out(workload.excluded, ignored, scores)
    _show(with_mean_draws(scores))


def _order(score: PolicyScores) -> str:
    """The policy without its backfill, which is the same for all."""
    return score.policy.partition("+")[0]


def _show(scores: Sequence[PolicyScores]) -> None:
    columns = ["policy", "wait", "median", "p95", "longest", "JCT", "vs first", "worse off"]
    first_s = scores[0].all_jobs.jct_s.mean
    rows = []
    for place, score in enumerate(scores):
        wait, jct_s = score.all_jobs.delay_s, score.all_jobs.jct_s.mean
        rows.append([
            _order(score), *map(short_time, (wait.mean, wait.median, wait.p95, wait.maximum, jct_s)),
            ratio_text(jct_s, first_s), share_text(score.against_first.worse_users) if place else "-",
        ])  # fmt: skip
    show_table(columns, rows, right=columns[1:])
    lengths = [length for length, group in scores[0].by["length"].items() if group.jobs]
    click.echo("\nmean JCT by run time")
    by_length = [
        [_order(each), *(short_time(each.by["length"][name].jct_s.mean) for name in lengths)] for each in scores
    ]
    show_table(["policy", *lengths], by_length, right=lengths)
