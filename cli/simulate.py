"""`almanac simulate`: what scheduling policies would have done with a trace of jobs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from almanac.errors import RequestError
from almanac.units import DAY_S, did_you_mean, format_count, printable
from cli.app import App
from cli.output import json_text, plot_file, progress, show_scores, simulation_json, write_plot
from cli.selection import read_capacity, read_settings, words_of

if TYPE_CHECKING:
    from simulator.cluster import Cluster
    from simulator.outcomes import PolicyRun
    from simulator.scores import PolicyScores
    from simulator.traces.read import Trace
    from simulator.workload import Workload

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_EVERY = {"is_json", "policies", "seed", "given", "watts"}
_MODES: Mapping[str, tuple[str, set[str]]] = {
    "packing": ("--packing", {"packing", "throughputs", "gpu_types", "gpus_per_node"}),
    "mig": ("--mig", {"mig", "source", "nodes", "gpus_per_node"}),
    "gpu_types": ("--gpu-types", {"gpu_types", "throughputs", "source", "processes"}),
}
"""Each mode's option, and its own parameters, in addition to those of every mode."""
_SETTINGS: Mapping[str, Mapping[str, tuple[float, float, float] | str]] = {
    "": {"warmup": (0.0, 0, 0.999), "cpus_as_gpus": (0, 0, 1), "controls": (1, 0, 1)},
    "gpu_types": {
        "round_s": (360.0, 1, DAY_S), "move_s": (10.0, 0, DAY_S), "load": (0.0, 0, 10), "jobs": (960, 1, 100_000),
        "error": (0.0, 0, 5),
    },
    "packing": {
        "load": (1.1, 0.01, 10), "jobs": (1500, 1, 100_000), "users": (30, 1, 100_000), "seeds": (5, 1, 1000),
        "gangs": (0, 0, 1), "error": (0.0, 0, 5),
    },
    "mig": {
        "model": "A100-40", "layout": "gpu", "demand": "daynight", "load": (1.31, 0.01, 20), "days": (4.0, 0.01, 60),
        "history_days": (0.0, 0, 30), "change_s": (120, 0, DAY_S), "plan_every_s": (3600, 60, DAY_S),
    },
}  # fmt: skip
"""By mode, settings of --set: (default, least, most) of numbers, and the default of a text."""


@dataclass(frozen=True)
class _SimulateCall:
    """The command line. options, settings: by name. advance: takes the share of the work that is done, and a policy."""

    app: App
    source: str | None
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    advance: Callable[[float, str], None]


@dataclass(frozen=True)
class _Simulated:
    """Result of a mode. about: the first line. bounds_s: lower bounds of makespan and mean JCT."""

    about: str
    facts: dict[str, Any]
    scores: Sequence[PolicyScores]
    runs: Sequence[PolicyRun] = ()
    excluded: Mapping[str, int] = field(default_factory=dict)
    ignored: Mapping[str, int] = field(default_factory=dict)
    bounds_s: tuple[float, float] | None = None
    notes: Sequence[str] = ()


@click.command("simulate")
@click.argument("source", metavar="[TRACE]", required=False)
@click.option("--policy", "policies", multiple=True, metavar="NAME,...",
              help="Policies to compare with the site's own order, or all those of --gpu-types, --packing, or --mig. "
              "A wrong name lists them. Without those options, each can have +skip, +easy, or +conservative. "
              "[fifo,qssf; else all]")  # fmt: skip
@click.option("--nodes", type=click.IntRange(1, 100_000), metavar="N", help="Nodes, all alike. [the trace's nodes]")
@click.option("--gpus-per-node", type=click.IntRange(1, 64), metavar="G", help="GPUs of each node. [8; with --mig: 1]")
@click.option(
    "--cluster-file", type=_FILE, metavar="FILE", help="Node sets and partitions in TOML, instead of --nodes."
)
@click.option("--gpu-types", metavar="TYPE=N,...", help="Compare on which of these GPUs the jobs of a Gavel trace run.")
@click.option("--packing", is_flag=True, help="Compare rules for two jobs on one GPU. Needs one type of --gpu-types.")
@click.option("--mig", is_flag=True, help="Compare layouts of GPUs that are cut into slices.")
@click.option("--throughputs", type=_FILE, metavar="FILE", help="Steps per second, for Gavel's traces and --packing.")
@click.option("--from", "skipped", type=click.FloatRange(0, 1, max_open=True), metavar="SHARE", default=0.0,
              help="Leave out this share of the jobs, the oldest ones. Predictors know them as history.")  # fmt: skip
@click.option("--set", "given", multiple=True, metavar="NAME=VALUE",
              help="Change a setting of the simulation. A wrong name lists them.")  # fmt: skip
@click.option("--watts", type=(click.FloatRange(0, 1e5), click.FloatRange(0, 1e5)), metavar="IDLE BUSY",
              default=(100.0, 437.5), show_default=True, help="Power of a GPU with its part of the node.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True,
              help="Seed of the bootstrap, and of generated jobs.")  # fmt: skip
@click.option("--jobs", "processes", type=click.IntRange(1, 256), metavar="N",
              help="Policies to simulate at once, each in its own process. [the number of cores]")  # fmt: skip
@click.option("--swf", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="Also write the simulated jobs in the Standard Workload Format.")  # fmt: skip
@click.option("--plot", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False), callback=plot_file,
              help="Also draw the policies. Replaces the .png, .svg, or .pdf file.")  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Print all scores as JSON.")
@click.pass_obj
def command(app: App, /, source: str | None, is_json: bool, **options: Any) -> None:
    """Simulate scheduling policies on a trace of jobs, and compare waits, energy, and use of the cluster.

    TRACE is a file: an export of sacct, another job table that `almanac ingest --jobs` reads, the Standard Workload
    Format (SWF), or a trace of Gavel. The word "generated" stands for a generated site. Without TRACE, the simulation
    runs the jobs in the store (for operators). It changes nothing.

    The first row of the table is the site's own order: first in, first out, with backfill if the simulation has one.
    """
    mode = _mode()
    settings = read_settings(options["given"], _SETTINGS[mode])
    simulate = {"": _policies, "gpu_types": _gpu_types, "packing": _packing, "mig": _mig}[mode]
    with progress("simulate") as advance:
        found = simulate(_SimulateCall(app, source, options, settings, lambda share, policy: advance(share, 1, policy)))
    if is_json:
        facts = {**found.facts, "settings": settings, "excluded": dict(found.excluded)}
        click.echo(json_text(simulation_json(facts, found.scores, found.runs)))
        return
    click.echo(found.about)
    show_scores(found.excluded, found.ignored, found.scores, found.bounds_s)
    for note in found.notes:
        click.echo(note)


def _mode() -> str:
    """The mode of the options; "" for the queue of whole GPUs. Raises click.UsageError for options of another one."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    names = {each.name: each.opts[0] for each in context.command.params} | {"source": "TRACE"}
    mode = next((mode for mode in _MODES if mode in given), "")
    if mode and (wrong := sorted(names[name] for name in given - _EVERY - _MODES[mode][1])):
        raise click.UsageError(f"{wrong[0]} does not go with {_MODES[mode][0]}")
    return mode


def _policies(asked: _SimulateCall) -> _Simulated:
    """The queue of whole GPUs."""
    from simulator.comparison import BASE, run_policies, with_controls
    from simulator.scores import score_runs

    app, options, settings = asked.app, asked.options, asked.settings
    named = words_of(options["policies"] or ("fifo,qssf",))
    if not named:
        raise click.BadParameter("names no policy", param_hint="--policy")
    names = [BASE, *(name for name in dict.fromkeys(named) if name != BASE)]
    if settings["controls"]:
        names = with_controls(names, app.config)
    asked.advance(0, "reading the trace")
    trace = _open(asked)
    cluster = find_cluster(trace, options)
    workload, first, ignored = scored_part(trace.workload, cluster, options["skipped"], settings["warmup"])
    processes = options["processes"] or len(os.sched_getaffinity(0))
    runs = run_policies(workload, cluster, names, app.config, first=first, processes=processes, advance=asked.advance)
    if options["swf"]:
        from almanac.atomic import write_output
        from simulator.traces.swf import swf_text

        write_output(options["swf"], swf_text(workload, cluster).encode())
    if options["plot"]:
        write_plot(options["plot"], f"{trace.name} on {format_count(cluster.gpu_count)} GPUs", runs, first)
    about = (
        f"{printable(trace.name)}: {format_count(len(workload))} jobs on {format_count(cluster.node_count)} nodes with "
        f"{format_count(cluster.gpu_count)} GPUs; {format_count(len(workload) - first)} jobs scored"
    )
    facts = simulation_facts(trace.name, workload, cluster, first, ignored)
    scores = score_runs(workload.jobs, runs, first, options["seed"], options["watts"])
    return _Simulated(about, facts, scores, runs, workload.excluded, ignored)


def simulation_facts(
    name: str, workload: Workload, cluster: Cluster, first: int, ignored: Mapping[str, int]
) -> dict[str, Any]:
    """Facts on a trace and its cluster, for JSON."""
    return {
        "trace": name,
        "jobs": len(workload),
        "scored_jobs": len(workload) - first,
        "excluded": dict(workload.excluded),
        "ignored_constraints": dict(ignored),
        "nodes": cluster.node_count,
        "gpus": cluster.gpu_count,
    }


def _open(asked: _SimulateCall) -> Trace:
    from simulator.traces.read import TraceOptions, open_trace, stored_trace

    app, options = asked.app, asked.options
    if asked.source is None:
        app.require_operator("a simulation reads all users' jobs")
        return stored_trace(app.store)
    are_cpus_gpus = bool(asked.settings["cpus_as_gpus"])
    return open_trace(
        asked.source, TraceOptions(app.config.tiers, are_cpus_gpus, options["throughputs"], options["seed"])
    )


def find_cluster(trace: Trace, options: Mapping[str, Any]) -> Cluster:
    """The cluster of --nodes or --cluster-file, or the one on which the jobs ran."""
    from simulator.cluster import read_cluster, uniform

    if options["nodes"] and options["cluster_file"]:
        raise click.UsageError("--nodes and --cluster-file exclude each other")
    if options["nodes"]:
        return uniform(options["nodes"], options["gpus_per_node"] or 8)
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
    from simulator.requests import keep_known_features
    from simulator.workload import split_history

    workload = split_history(workload, skipped)
    workload, ignored = keep_known_features(workload, cluster)
    return workload, int(warmup * len(workload)), dict(ignored)


def _gpu_types(asked: _SimulateCall) -> _Simulated:
    """Jobs whose speed depends on the GPU type."""
    from simulator.policies.types.comparison import (
        BASE,
        ONE_PLACE_EXCEPT,
        POLICIES,
        PlacementOptions,
        run_placements,
    )  # fmt: skip
    from simulator.scores import score_runs
    from simulator.traces.gavel import poisson_arrivals, read_problem

    source, options, settings = asked.source, asked.options, asked.settings
    capacity, names = read_capacity(options["gpu_types"]), named_policies(options["policies"], POLICIES, BASE)
    if settings["move_s"] >= settings["round_s"]:
        raise click.UsageError("move_s must be less than round_s: a job that is moved each round would never end")
    if source is None or options["throughputs"] is None:
        raise click.UsageError("--gpu-types needs TRACE, a trace of Gavel, and --throughputs FILE")
    problem, excluded = read_problem(Path(source), options["throughputs"], capacity)
    if settings["load"]:
        problem = poisson_arrivals(problem, settings["load"], settings["jobs"], options["seed"])
    chosen = PlacementOptions(settings["round_s"], settings["move_s"], settings["error"], seed=options["seed"])
    try:
        runs, bounds = run_placements(problem, names, chosen, options["processes"] or 1, asked.advance)
    except ValueError as error:  # such as a linear program of numbers that are too far apart
        raise RequestError(f"{source}: cannot be simulated: {error}", "check steps, GPUs, and throughputs") from error
    gpus = ", ".join(f"{count} {kind}" for kind, count in capacity.items())
    is_forked = any(name in ONE_PLACE_EXCEPT for name in names)
    return _Simulated(
        f"{printable(Path(source).name, 60)}: {format_count(len(problem))} jobs on {printable(gpus)}",
        {"trace": Path(source).name, "jobs": len(problem), "gpus": capacity,
         "bounds": {"makespan_s": bounds.makespan_s, "mean_jct_s": bounds.mean_jct_s}},
        score_runs(problem.job_table(), runs, 0, options["seed"], options["watts"]),
        excluded=excluded,
        bounds_s=(bounds.makespan_s, bounds.mean_jct_s),
        notes=["hadare runs a job in several places at once: the bounds do not apply to it"] if is_forked else (),
    )  # fmt: skip


def _packing(asked: _SimulateCall) -> _Simulated:
    """Two jobs on one GPU. The figures are means over the seeds."""
    from simulator.policies.packing import BASE, POLICIES, PackingNodes, run_packing
    from simulator.scores import mean_of_draws, score_runs
    from simulator.traces.packing import GANGS, ONE_GPU, ArrivalOptions, read_pairs

    options, settings = asked.options, asked.settings
    names = named_policies(options["policies"], POLICIES, BASE)
    capacity = read_capacity(options["gpu_types"]) if options["gpu_types"] else {}
    if len(capacity) != 1 or options["throughputs"] is None:
        raise click.UsageError("--packing needs --throughputs FILE, and --gpu-types with one type, such as v100=36")
    ((gpu_type, gpus),) = capacity.items()
    shares = {size: share for size, share in GANGS.items() if size <= gpus} if settings["gangs"] else ONE_GPU
    arrivals = ArrivalOptions(settings["load"], settings["jobs"], settings["users"], gpus, shares=shares)
    table = read_pairs(options["throughputs"], gpu_type)
    nodes = PackingNodes.uniform(gpus, min(options["gpus_per_node"] or 8, gpus))
    by_seed = []
    for number in range(settings["seeds"]):
        asked.advance(number / settings["seeds"], "packing")
        jobs, runs = run_packing(table, names, arrivals, nodes, options["seed"] + number, settings["error"])
        by_seed.append(score_runs(jobs, runs, 0, options["seed"], options["watts"]))
    return _Simulated(
        f"{format_count(arrivals.jobs)} jobs of {format_count(arrivals.users)} users on {format_count(gpus)} "
        f"{printable(gpu_type, 40)}, load {arrivals.load:g}; means over {format_count(len(by_seed))} seeds",
        {"jobs": arrivals.jobs, "gpus": capacity},
        [mean_of_draws(scores, scores[0].policy) for scores in zip(*by_seed, strict=True)],
    )


def _mig(asked: _SimulateCall) -> _Simulated:
    """Jobs of one slice."""
    from almanac.hardware import mig_models
    from simulator.policies.mig.comparison import ALONE, POLICIES, job_table, run_mig
    from simulator.policies.mig.layouts import MigSite
    from simulator.policies.mig.schemes import count_refusals
    from simulator.scores import score_runs
    from simulator.traces.mig import DEMANDS, generate, parse_layouts, read_trace, split_days

    source, options, settings = asked.source, asked.options, asked.settings
    names, model = named_policies(options["policies"], POLICIES, ALONE), mig_models().get(settings["model"])
    for name, known in (("model", mig_models()), ("demand", DEMANDS)):
        if settings[name] not in known:
            text = f"{name}={printable(settings[name])} is none of {', '.join(known)}"
            raise click.BadParameter(text, param_hint="--set")
    nodes, per_node, before = options["nodes"] or 16, options["gpus_per_node"] or 1, settings["history_days"]
    if nodes > 64 or per_node > 16:
        raise click.UsageError(f"--mig simulates up to 64 nodes of 16 GPUs, not {nodes} of {per_node}")
    assert model is not None
    try:
        layouts = parse_layouts(settings["layout"], model, nodes * per_node)
    except ValueError as error:
        raise click.BadParameter(f"layout: {error}", param_hint="--set") from error
    initial = tuple(layouts[first : first + per_node] for first in range(0, len(layouts), per_node))
    site = MigSite(model.name, nodes, per_node, settings["change_s"], settings["plan_every_s"], initial)
    if source:
        jobs, excluded = read_trace(Path(source), model)
        days = max(jobs[-1].submit_s / DAY_S - before, 1 / 24)
    else:
        days, excluded = settings["days"], {}
        jobs = generate(DEMANDS[settings["demand"]], model, site.gpus, settings["load"], days + before, options["seed"])
    history, jobs = split_days(jobs, before)
    if not jobs:
        raise RequestError("no job is left to simulate", "set more days, a higher load, or fewer history_days")
    runs = run_mig(jobs, site, names, history, asked.advance)
    load = sum(job.full_s for job in jobs) / (site.gpus * days * DAY_S)
    refused = count_refusals(jobs, model, site.gpus)
    return _Simulated(
        f"{format_count(len(jobs))} jobs on {format_count(nodes)} nodes with {format_count(site.gpus)} {model.name} "
        f"GPUs; load {load:.2f} of the full GPUs",
        {"jobs": len(jobs), "nodes": nodes, "gpus": site.gpus, "load": load,
         "refused": {"first_fit": refused.first_fit, "reachability": refused.reachability}},
        score_runs(job_table(jobs), runs, 0, options["seed"], options["watts"]),
        excluded=excluded,
        notes=[f"refused without a queue: first fit {refused.first_fit:.1%}, reachability {refused.reachability:.1%}"],
    )  # fmt: skip


def named_policies(given: Sequence[str], known: Collection[str], base: str) -> list[str]:
    """Return the names of --policy, the base first; all of them by default. Raises click.BadParameter."""
    names = words_of(given or ("all",))
    for name in names:
        if name != "all" and name not in known:
            raise click.BadParameter(
                f"{printable(name, 40)} is no policy here; {did_you_mean(name, known)}known: all, {', '.join(known)}",
                param_hint="--policy",
            )
    if not names:
        raise click.BadParameter("names no policy", param_hint="--policy")
    return list(dict.fromkeys([base, *(known if "all" in names else names)]))


@click.command("simulate", hidden=True, context_settings={"ignore_unknown_options": True})
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def mig_command(context: click.Context, words: tuple[str, ...]) -> None:
    """Simulate a cluster with MIG. The old spelling of `almanac simulate --mig`."""
    click.echo("warning: `almanac mig simulate` goes with the next release; use `almanac simulate --mig`", err=True)
    settings = {f"--{name.replace('_', '-')}": name for name in _SETTINGS["mig"]}
    given = ["--mig"]
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in settings:
            given += ["--set", f"{settings[name]}={value if equals else next(rest, '')}"]
        else:
            given.append(word)
    with command.make_context("simulate", given, parent=context.find_root()) as inner:
        command.invoke(inner)
