"""`almanac simulate --gpu-types`: on which GPU type each job runs, policies and lower bounds side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from almanac.errors import RequestError
from almanac.units import HOUR_S, did_you_mean, format_count, printable
from cli.output import json_text, progress, show_table, write_separated
from cli.selection import words_of
from cli.simulate_output import ratio_text

if TYPE_CHECKING:
    from simulator.placement.comparison import PlacementBounds, PlacementOptions, PlacementScore
    from simulator.placement.problem import PlacementProblem

DEFAULT = "fifo,max-min-perf,priced-srpt-stay,priced-srpt"
_MOST_GPUS = 100_000
_OTHER_MODE = (
    "policies", "nodes", "gpus_per_node", "cluster_file", "skipped", "warmup", "cpus_as_gpus", "swf", "plot"
)  # fmt: skip
"""Options of simulations of a queue."""
_OWN = ("placement", "round_s", "move_s", "arrivals", "arrival_jobs", "runtime_error", "is_csv")
_OPTIONS = (
    click.option("--gpu-types", metavar="TYPE=N,...", help="Compare placements of a Gavel trace on these GPUs."),
    click.option("--placement", multiple=True, default=(DEFAULT,), show_default=True, metavar="NAME,...",
                 help="With --gpu-types: placement policies, or all. A wrong name lists them."),
    click.option("--round-s", type=click.FloatRange(1, 86_400), default=360.0, show_default=True, metavar="S",
                 help="With --gpu-types: seconds between decisions."),
    click.option("--move-s", type=click.FloatRange(0, 86_400), default=10.0, show_default=True, metavar="S",
                 help="With --gpu-types: seconds that a moved job loses."),
    click.option("--arrivals", type=click.FloatRange(0, 10, min_open=True), metavar="LOAD",
                 help="With --gpu-types: draw jobs from the trace that arrive at random, at this share of the rate "
                 "that the GPUs could serve at best."),
    click.option("--arrival-jobs", type=click.IntRange(1, 100_000), default=960, show_default=True, metavar="N",
                 help="Jobs to draw, with --arrivals."),
    click.option("--runtime-error", type=click.FloatRange(0, 5), default=0.0, show_default=True, metavar="SIGMA",
                 help="With --gpu-types: policies know run times with a lognormal error; with --packing, speeds of "
                 "pairs."),
    click.option("--csv", "is_csv", is_flag=True, help="With --gpu-types: print CSV."),
)  # fmt: skip


def placement_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to the command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def simulates_placement() -> bool:
    """Whether --gpu-types is given. Raises click.UsageError for options of the other mode."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    is_placement = "gpu_types" in given
    names = {each.name: each.opts[0] for each in context.command.params}
    if wrong := sorted(names[name] for name in given.intersection(_OTHER_MODE if is_placement else _OWN)):
        said = "does not go with --gpu-types" if is_placement else "needs --gpu-types"
        raise click.UsageError(f"{wrong[0]} {said}")
    return is_placement


def simulate_placement(source: str | None, is_json: bool, options: Mapping[str, Any]) -> None:
    """Read, simulate, and print."""
    from simulator.placement.arrivals import poisson_arrivals
    from simulator.placement.comparison import PlacementOptions, compare_policies
    from simulator.placement.trace import read_problem

    if is_json and options["is_csv"]:
        raise click.UsageError("--json and --csv exclude each other")
    if options["move_s"] >= options["round_s"]:
        raise click.UsageError("--move-s must be less than --round-s: a job that is moved each round would never end")
    capacity, names = read_capacity(options["gpu_types"]), _policies(options["placement"])
    if source is None or options["throughputs"] is None:
        raise click.UsageError("--gpu-types needs TRACE, a trace of Gavel, and --throughputs FILE")
    settings = PlacementOptions(
        round_s=options["round_s"], move_s=options["move_s"], error=options["runtime_error"], seed=options["seed"]
    )
    problem, left_out = read_problem(Path(source), options["throughputs"], capacity)
    if options["arrivals"]:
        problem = poisson_arrivals(problem, options["arrivals"], options["arrival_jobs"], options["seed"])
    try:
        with progress("simulate") as advance:
            scores, bounds = compare_policies(
                problem, names, settings, options["processes"] or 1, lambda share, policy: advance(share, 1, policy)
            )
    except ValueError as error:  # such as a linear program of numbers that are too far apart
        raise RequestError(f"{source}: cannot be simulated: {error}", "check steps, GPUs, and throughputs") from error
    if is_json:
        click.echo(json_text(_as_json(Path(source).name, problem, left_out, settings, scores, bounds)))
    elif options["is_csv"]:
        rows = _rows(scores, bounds)
        write_separated(list(rows[0]), rows, ",", is_for_spreadsheets=True)
    else:
        _show(Path(source).name, problem, left_out, scores, bounds)


def read_capacity(text: str) -> dict[str, int]:
    """GPUs by type, of TYPE=N,... Raises click.BadParameter."""
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, count = (each.strip() for each in part.rpartition("="))
        if not name or not (count.isascii() and count.isdecimal()) or not 0 < int(count) <= _MOST_GPUS:
            raise click.BadParameter(
                f"{printable(part, 40)} is not TYPE=N, with 1 to {_MOST_GPUS} GPUs", param_hint="--gpu-types"
            )
        if name in found:
            raise click.BadParameter(f"names {printable(name, 40)} twice", param_hint="--gpu-types")
        found[name] = int(count)
    if not found:
        raise click.BadParameter("names no type; give TYPE=N,...", param_hint="--gpu-types")
    return found


def _policies(given: Sequence[str]) -> list[str]:
    from simulator.placement.comparison import POLICIES

    names = words_of(given)
    for name in names:
        if name != "all" and name not in POLICIES:
            guess = did_you_mean(name, POLICIES)
            raise click.BadParameter(
                f"{printable(name, 40)} is no placement policy. {guess}Known: all, {', '.join(POLICIES)}",
                param_hint="--placement",
            )
    if not names:
        raise click.BadParameter("names no policy", param_hint="--placement")
    return list(POLICIES) if "all" in names else list(dict.fromkeys(names))


def _show(
    name: str,
    problem: PlacementProblem,
    left_out: Mapping[str, int],
    scores: Sequence[PlacementScore],
    bounds: PlacementBounds,
) -> None:
    from simulator.placement.comparison import ONE_PLACE_EXCEPT

    gpus = ", ".join(f"{count} {kind}" for kind, count in zip(problem.types, problem.capacity.tolist(), strict=True))
    click.echo(f"{printable(name, 60)}: {format_count(len(problem))} jobs on {printable(gpus)}")
    for reason, count in left_out.items():
        click.echo(f"  left out: {format_count(count)} {reason}")
    cells = [
        [
            score.policy, f"{score.makespan_s / HOUR_S:.2f}", ratio_text(score.makespan_s, bounds.makespan_s),
            f"{score.mean_jct_s / HOUR_S:.2f}", ratio_text(score.mean_jct_s, bounds.mean_jct_s),
            f"{score.longest_first_wait_s / HOUR_S:.2f}", format_count(score.moves),
        ]
        for score in scores
    ]  # fmt: skip
    least = ["lower bound", f"{bounds.makespan_s / HOUR_S:.2f}", "1.00", f"{bounds.mean_jct_s / HOUR_S:.2f}", "1.00"]
    columns = ["policy", "makespan h", "/bound", "mean JCT h", "/bound", "first wait h", "moves"]
    show_table(columns, [*cells, [*least, "", ""]], right=columns[1:])
    click.echo("first wait: the longest from submission to the first start")
    if any(score.policy in ONE_PLACE_EXCEPT for score in scores):
        click.echo("hadare runs a job in several places at once: the bounds do not apply to it")


def _rows(scores: Sequence[PlacementScore], bounds: PlacementBounds) -> list[dict[str, Any]]:
    from simulator.placement.comparison import ONE_PLACE_EXCEPT

    rows = []
    for score in scores:
        is_bounded = score.policy not in ONE_PLACE_EXCEPT
        rows.append(
            {
                **asdict(score),
                "makespan_over_bound": score.makespan_s / bounds.makespan_s if is_bounded else None,
                "mean_jct_over_bound": score.mean_jct_s / bounds.mean_jct_s if is_bounded else None,
            }
        )
    return rows


def _as_json(
    name: str,
    problem: PlacementProblem,
    left_out: Mapping[str, int],
    settings: PlacementOptions,
    scores: Sequence[PlacementScore],
    bounds: PlacementBounds,
) -> dict[str, Any]:
    """Times in seconds."""
    if not all(math.isfinite(value) for value in asdict(bounds).values()):
        raise RequestError(f"{name}: the lower bounds are not finite", "check the steps and times of the trace")
    return {
        "trace": name,
        "jobs": len(problem),
        "left_out": dict(left_out),
        "gpus": dict(zip(problem.types, problem.capacity.tolist(), strict=True)),
        "settings": asdict(settings),
        "bounds": asdict(bounds),
        "policies": _rows(scores, bounds),
    }
