"""`almanac simulate`: what scheduling policies would have done with a trace of jobs."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import RequestError
from almanac.units import format_count, printable
from cli.app import App
from cli.backtest_power import plot_file
from cli.output import json_text, progress
from cli.selection import words_of
from cli.simulate_output import as_json, show_scores
from cli.simulate_packing import packing_options, simulate_packing, simulates_packing
from cli.simulate_placement import placement_options, simulate_placement, simulates_placement

if TYPE_CHECKING:
    from simulator.cluster import Cluster
    from simulator.outcomes.scores import PolicyRun
    from simulator.traces.read import Trace
    from simulator.workload import Workload

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("simulate")
@click.argument("source", metavar="[TRACE]", required=False)
@click.option("--policy", "policies", multiple=True, default=("fifo,qssf",), show_default=True, metavar="NAME,...",
              help="Policies to compare with the first one. Each can have +skip, +easy, or +conservative.")  # fmt: skip
@click.option("--controls/--no-controls", default=True, show_default=True,
              help="Add the controls if a policy uses predictions.")  # fmt: skip
@click.option("--nodes", type=click.IntRange(1, 100_000), metavar="N", help="Nodes, all alike. [the trace's nodes]")
@click.option("--gpus-per-node", type=click.IntRange(1, 64), metavar="G", default=8, show_default=True,
              help="GPUs of each node, with --nodes.")  # fmt: skip
@click.option(
    "--cluster-file", type=_FILE, metavar="FILE", help="Node sets and partitions in TOML, instead of --nodes."
)
@click.option("--from", "skipped", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE", default=0.0,
              help="Leave out this share of the jobs, the oldest ones. Predictors know them as history.")  # fmt: skip
@click.option("--warmup", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE", default=0.0,
              help="Simulate this share of the jobs, the first ones, but do not score them.")  # fmt: skip
@click.option("--cpus-as-gpus", is_flag=True, help="Let CPUs stand for GPUs, for job tables without GPUs.")
@click.option("--throughputs", type=_FILE, metavar="FILE", help="Steps per second, for Gavel's traces.")
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True,
              help="Seed of the bootstrap and of the generated trace.")  # fmt: skip
@click.option("--jobs", "processes", type=click.IntRange(1, 256), metavar="N",
              help="Policies to simulate at once, each in its own process. [the number of cores]")  # fmt: skip
@click.option("--swf", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also write the simulated jobs in the Standard Workload Format.")  # fmt: skip
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), callback=plot_file,
              help="Also draw the policies. Replaces the .png, .svg, or .pdf file.")  # fmt: skip
@placement_options
@packing_options
@click.option("--json", "is_json", is_flag=True, help="Print all scores as JSON.")
@click.pass_obj
def command(app: App, /, source: str | None, policies: tuple[str, ...], is_json: bool, **options: Any) -> None:
    """Simulate scheduling policies on a trace of jobs, and compare waits and use of the cluster.

    TRACE is a file: an export of sacct, another job table that `almanac ingest --jobs` reads, the Standard Workload
    Format (SWF), or a trace of Gavel. The word "generated" stands for a generated site. Without TRACE, the simulation
    runs the jobs in the store (for operators). It changes nothing.

    With --gpu-types, it compares where to run the jobs of a Gavel trace: `almanac simulate TRACE --throughputs FILE
    --gpu-types v100=20,p100=20,k80=20 --placement all`.

    With --packing, it compares rules for two jobs on one GPU. It draws the jobs from a file of measured pairs: `almanac
    simulate --packing all --throughputs FILE --gpu-types v100=36`.
    """
    if simulates_packing():
        simulate_packing(source, is_json, options)
        return
    if simulates_placement():
        simulate_placement(source, is_json, options)
        return
    from simulator.comparison import run_policies, with_controls
    from simulator.outcomes.scores import score_runs

    names = words_of(policies)
    if not names:
        raise click.BadParameter("names no policy", param_hint="--policy")
    if options["controls"]:
        names = tuple(with_controls(names, app.config))
    processes = options["processes"] or len(os.sched_getaffinity(0))
    with progress("simulate") as advance:
        advance(0, 1, "reading the trace")
        trace = _open(app, source, options)
        cluster = find_cluster(trace, options)
        workload, first, ignored = scored_part(trace.workload, cluster, options["skipped"], options["warmup"])
        runs = run_policies(
            workload, cluster, names, app.config, first=first, processes=processes,
            advance=lambda share, policy: advance(share, 1, policy),
        )  # fmt: skip
    scores = score_runs(workload, runs, first, options["seed"])
    if options["swf"]:
        _write_swf(options["swf"], workload, cluster)
    if options["plot"]:
        _write_plot(options["plot"], f"{trace.name} on {format_count(cluster.gpu_count)} GPUs", runs, first)
    if is_json:
        click.echo(json_text(as_json(trace.name, workload, cluster, first, ignored, scores, runs)))
        return
    click.echo(
        f"{printable(trace.name)}: {format_count(len(workload))} jobs on {format_count(cluster.node_count)} nodes with "
        f"{format_count(cluster.gpu_count)} GPUs; {format_count(len(workload) - first)} jobs scored"
    )
    show_scores(workload.excluded, ignored, scores)


def _open(app: App, source: str | None, options: dict[str, Any]) -> Trace:
    from simulator.traces.read import TraceOptions, open_trace, stored_trace

    if source is None:
        app.require_operator("a simulation reads all users' jobs")
        return stored_trace(app.cluster_store())
    return open_trace(
        source, TraceOptions(app.config.tiers, options["cpus_as_gpus"], options["throughputs"], options["seed"])
    )


def find_cluster(trace: Trace, options: dict[str, Any]) -> Cluster:
    """The cluster of --nodes or --cluster-file, or the one on which the jobs ran."""
    from simulator.cluster import uniform
    from simulator.cluster_file import read_cluster

    if options["nodes"] and options["cluster_file"]:
        raise click.UsageError("--nodes and --cluster-file exclude each other")
    if options["nodes"]:
        return uniform(options["nodes"], options["gpus_per_node"])
    if options["cluster_file"]:
        return read_cluster(options["cluster_file"])(int(trace.workload.array("submit_s")[0]))
    cluster = trace.find_cluster()
    if cluster is None:
        raise RequestError(
            f"{trace.name} does not name the nodes on which its jobs ran",
            "give --nodes N and --gpus-per-node G, or --cluster-file FILE",
        )
    return cluster


def scored_part(
    workload: Workload, cluster: Cluster, skipped: float, warmup: float
) -> tuple[Workload, int, dict[str, int]]:
    """The workload to simulate, the number of its first scored job, and constraints that the cluster does not know."""
    from simulator.constraints import keep_known_features
    from simulator.workload import split_history

    workload = split_history(workload, skipped)
    workload, ignored = keep_known_features(workload, cluster)
    return workload, int(warmup * len(workload)), dict(ignored)


def _write_swf(path: Path, workload: Workload, cluster: Cluster) -> None:
    from simulator.traces.swf import swf_text
    from telemetry.store.atomic import write_output

    write_output(path, swf_text(workload, cluster).encode())


def _write_plot(path: Path, title: str, runs: Sequence[PolicyRun], first: int) -> None:
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it logs where it keeps its font list
    from reports.simulation_plot import PolicyCurves, render_simulation_plot
    from telemetry.store.atomic import write_output

    curves = []
    for run in runs:
        known, line = run.jobs.is_known[first:], run.timeline
        curves.append(
            PolicyCurves(
                policy=run.policy,
                jct_s=run.jobs.jct_s[first:][known],
                delay_s=run.jobs.delay_s[first:][known],
                edges_s=line.edges_s,
                used=line.busy_gpus / line.gpus,
                fragmented=line.fragmented_gpus / line.gpus,
                waiting_jobs=line.waiting_jobs,
            )
        )
    write_output(path, render_simulation_plot(title, curves, path.suffix.lower().removeprefix(".")))
