"""`almanac simulate --packing`: which two jobs may share a GPU, policies side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from almanac.units import HOUR_S, did_you_mean, format_count, printable
from cli.output import json_text, progress, show_table, write_separated
from cli.selection import words_of
from cli.simulate_placement import read_capacity

if TYPE_CHECKING:
    from simulator.packing.comparison import PackingScore
    from simulator.packing.workload import ArrivalOptions

_LOAD = 1.1
_OWN = ("packing", "users", "seeds", "with_gangs")
_SHARED = (
    "throughputs", "gpu_types", "arrivals", "arrival_jobs", "gpus_per_node", "runtime_error", "seed", "is_json",
    "is_csv",
)  # fmt: skip
_OPTIONS = (
    click.option("--packing", multiple=True, metavar="NAME,...",
                 help="Compare policies that let two jobs share a GPU, or all. Needs --throughputs with measured "
                 "pairs and one type of --gpu-types. A wrong name lists the policies."),
    click.option("--users", type=click.IntRange(1, 100_000), default=30, show_default=True, metavar="N",
                 help="With --packing: users who submit jobs."),
    click.option("--seeds", type=click.IntRange(1, 1000), default=5, show_default=True, metavar="N",
                 help="With --packing: simulate this many seeds, from --seed on."),
    click.option("--gangs", "with_gangs", is_flag=True,
                 help="With --packing: also draw jobs of 2, 4, and 8 GPUs, on nodes of --gpus-per-node."),
)  # fmt: skip


def packing_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to the command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def simulates_packing() -> bool:
    """Whether --packing is given. Raises click.UsageError for options of another mode."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    is_packing = "packing" in given
    names = {each.name: each.opts[0] for each in context.command.params if isinstance(each, click.Option)}
    others = set(names) - {*_OWN, *_SHARED}
    if wrong := sorted(names[name] for name in given.intersection(others if is_packing else _OWN)):
        raise click.UsageError(f"{wrong[0]} {'does not go with' if is_packing else 'needs'} --packing")
    return is_packing


def simulate_packing(source: str | None, is_json: bool, options: Mapping[str, Any]) -> None:
    """Draw jobs, simulate, and print."""
    from advisor.decisions.packing_sets import PackingNodes
    from simulator.packing.comparison import compare_packing
    from simulator.packing.pairs import read_pairs
    from simulator.packing.workload import GANGS, ONE_GPU, ArrivalOptions

    names = _policies(options["packing"])
    gpu_type, gpus = _one_type(options["gpu_types"])
    if is_json and options["is_csv"]:
        raise click.UsageError("--json and --csv exclude each other")
    if source is not None:
        raise click.UsageError("TRACE does not go with --packing, which draws jobs from --throughputs")
    if options["throughputs"] is None:
        raise click.UsageError("--packing needs --throughputs FILE")
    gpus_per_node = min(options["gpus_per_node"], gpus)
    shares = {size: share for size, share in GANGS.items() if size <= gpus} if options["with_gangs"] else ONE_GPU
    settings = ArrivalOptions(
        options["arrivals"] or _LOAD, options["arrival_jobs"], options["users"], gpus, shares=shares
    )
    table = read_pairs(options["throughputs"], gpu_type)
    seeds = range(options["seed"], options["seed"] + options["seeds"])
    with progress("simulate") as advance:
        scores = compare_packing(
            table, names, settings, PackingNodes.uniform(gpus, gpus_per_node), seeds, options["runtime_error"],
            lambda share, policy: advance(share, 1, policy),
        )  # fmt: skip
    if is_json:
        setting = {
            "gpu_type": gpu_type,
            "gpus_per_node": gpus_per_node,
            "error": options["runtime_error"],
            "seeds": list(seeds),
            **asdict(settings),
        }
        click.echo(json_text({"settings": setting, "policies": _rows(scores)}))
    elif options["is_csv"]:
        rows = [{**row, "ratios": " ".join(f"{ratio:.4f}" for ratio in row["ratios"])} for row in _rows(scores)]
        write_separated(list(rows[0]), rows, ",", is_for_spreadsheets=True)
    else:
        _show(gpu_type, settings, len(seeds), scores)


def _one_type(text: str | None) -> tuple[str, int]:
    capacity = read_capacity(text) if text else {}
    if len(capacity) != 1:
        raise click.UsageError("--packing needs --gpu-types with one type, such as v100=36")
    ((gpu_type, gpus),) = capacity.items()
    return gpu_type, gpus


def _policies(given: Sequence[str]) -> list[str]:
    from simulator.packing.policies import POLICIES

    names = words_of(given)
    for name in names:
        if name != "all" and name not in POLICIES:
            raise click.BadParameter(
                f"{printable(name, 40)} is no packing policy. {did_you_mean(name, POLICIES)}"
                f"Known: all, {', '.join(POLICIES)}",
                param_hint="--packing",
            )
    if not names:
        raise click.BadParameter("names no policy", param_hint="--packing")
    return list(POLICIES) if "all" in names else list(dict.fromkeys(names))


def _show(gpu_type: str, settings: ArrivalOptions, seeds: int, scores: Sequence[PackingScore]) -> None:
    click.echo(
        f"{format_count(settings.jobs)} jobs of {format_count(settings.users)} users on {format_count(settings.gpus)} "
        f"{printable(gpu_type, 40)}, load {settings.load:g}, {format_count(seeds)} seed{'s' if seeds > 1 else ''}"
    )
    cells = [
        [
            score.policy, f"{score.mean_jct_s / HOUR_S:.2f}", f"{score.ratio:.2f}", f"{score.spread:.2f}",
            f"{score.mean_wait_s / HOUR_S:.2f}", f"{score.shared:.0%}", f"{score.slow:.1%}", f"{score.least_speed:.2f}",
        ]
        for score in scores
    ]  # fmt: skip
    columns = ["policy", "mean JCT h", "/none", "+-", "wait h", "shared", "below .6", "slowest"]
    show_table(columns, cells, right=columns[1:])
    click.echo("+-: standard deviation over seeds; below .6: share of jobs under 0.6 of their own speed, worst seed")


def _rows(scores: Sequence[PackingScore]) -> list[dict[str, Any]]:
    """Times in seconds."""
    return [{**asdict(score), "ratio": score.ratio, "spread": score.spread} for score in scores]
