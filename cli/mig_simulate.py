"""`almanac mig simulate`: what layouts that follow the jobs would have done for a MIG cluster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.errors import RequestError
from almanac.units import DAY_S, format_count, printable
from cli.output import json_text, show_table
from cli.simulate_output import short_time

if TYPE_CHECKING:
    from simulator.mig.comparison import MigComparison, MigSite
    from simulator.mig.demand import SliceRequest

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command("simulate")
@click.argument("trace", type=_FILE, required=False)
@click.option("--model", default="A100-40", show_default=True, metavar="NAME", help="GPU model of all nodes.")
@click.option("--nodes", type=click.IntRange(1, 64), default=16, show_default=True, metavar="N", help="Nodes.")
@click.option("--gpus-per-node", type=click.IntRange(1, 16), default=1, show_default=True, metavar="G",
              help="GPUs of each node. A node changes as a whole.")  # fmt: skip
@click.option("--layout", default="gpu", show_default=True, metavar="GPU,...",
              help="Layouts at the start, such as 4:1g+2g+4g,gpu: four GPUs cut so, all others full.")  # fmt: skip
@click.option("--demand", default="daynight", show_default=True, metavar="NAME",
              help="Generated demand: daynight, flat, tight, tight-flat, small, large, drift, drift-large, heavy, or "
              "bursts.")  # fmt: skip
@click.option("--load", type=click.FloatRange(0, 20, min_open=True), default=1.31, show_default=True,
              help="Time that the generated jobs take on full GPUs, over the GPUs' time.")  # fmt: skip
@click.option("--days", type=click.FloatRange(0, 60, min_open=True), default=4.0, show_default=True,
              help="Length of the generated trace.")  # fmt: skip
@click.option("--history-days", type=click.FloatRange(0, 30), default=0.0, show_default=True,
              help="Days before the first one that only the planner knows. With TRACE, its first days.")  # fmt: skip
@click.option("--change-s", type=click.IntRange(0, 86400), default=120, show_default=True,
              help="Seconds that a node is out of service for a change of layout.")  # fmt: skip
@click.option("--plan-every-s", type=click.IntRange(60, 86400), default=3600, show_default=True,
              help="Seconds between two plans.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=1, show_default=True, help="Seed of the generated trace.")
@click.option("--json", "is_json", is_flag=True, help="Print the figures as JSON.")
def command(trace: Path | None, is_json: bool, **options: Any) -> None:
    """Simulate a cluster with MIG: jobs of one slice arrive, and the layouts follow them.

    TRACE is a CSV, JSON, or Parquet file with a row per job: submit_s, run_s on a full GPU, and shape or memory_gib;
    also compute, the compute slices that it keeps busy. Without TRACE, the jobs are generated. It changes nothing.
    """
    from simulator.mig.comparison import MigSite, compare

    layouts = _layouts(options["layout"], options["model"], options["nodes"] * options["gpus_per_node"])
    per_node = options["gpus_per_node"]
    site = MigSite(
        model=options["model"],
        nodes=options["nodes"],
        gpus_per_node=per_node,
        change_s=options["change_s"],
        plan_every_s=options["plan_every_s"],
        initial=tuple(layouts[first : first + per_node] for first in range(0, len(layouts), per_node)),
    )
    history, jobs, days, left_out = _jobs(trace, site, options)
    if not jobs:
        raise RequestError("no job is left to simulate", "give more days, a higher load, or fewer --history-days")
    found = compare(jobs, site, days, history)
    if is_json:
        click.echo(json_text(_as_json(found, site, left_out)))
    else:
        _show(found, site, left_out)


def _layouts(text: str, model_name: str, gpus: int) -> tuple[tuple[str, ...], ...]:
    """A layout for each GPU. Raises BadParameter for one that the model cannot have."""
    from advisor.mig.sizes import WHOLE, sizes_of
    from advisor.mig.states import is_placeable
    from almanac.mig import mig_models

    model = mig_models().get(model_name)
    if model is None:
        raise click.BadParameter(f"{printable(model_name)} is none of {', '.join(mig_models())}", param_hint="--model")
    found: list[tuple[str, ...]] = []
    last: tuple[str, ...] = (WHOLE,)
    for part in text.split(","):
        count, _, name = part.strip().rpartition(":")
        shapes = tuple(sorted(name.split("+")))
        is_whole = shapes == (WHOLE,)
        is_known = all(shape in sizes_of(model).shapes[:-1] for shape in shapes)
        if not is_whole and not (is_known and is_placeable(model, {each: shapes.count(each) for each in shapes})):
            raise click.BadParameter(f"{printable(name)} is no layout of {model.name}", param_hint="--layout")
        if count and not (count.isdecimal() and 0 < int(count) <= gpus):
            raise click.BadParameter(f"{printable(count)} is no number of GPUs up to {gpus}", param_hint="--layout")
        found += [shapes] * (int(count) if count else 0)
        last = last if count else shapes
    if len(found) > gpus:
        raise click.BadParameter(f"names {len(found)} GPUs; the nodes have {gpus}", param_hint="--layout")
    return tuple(found + [last] * (gpus - len(found)))


def _jobs(
    trace: Path | None, site: MigSite, options: Mapping[str, Any]
) -> tuple[list[SliceRequest], list[SliceRequest], float, Mapping[str, int]]:
    """Jobs before the simulation, jobs in it, its length in days, and rows that were left out."""
    from almanac.mig import mig_models
    from simulator.mig.comparison import split_history
    from simulator.mig.demand import DEMANDS, generate
    from simulator.mig.trace import read_trace

    model, before = mig_models()[site.model], options["history_days"]
    if trace is not None:
        jobs, left_out = read_trace(trace, model)
        days = max(jobs[-1].submit_s / DAY_S - before, 1 / 24)
    else:
        demand = DEMANDS.get(options["demand"])
        if demand is None:
            names = ", ".join(DEMANDS)
            raise click.BadParameter(f"{printable(options['demand'])} is none of {names}", param_hint="--demand")
        days, left_out = options["days"], {}
        jobs = generate(demand, model, site.gpus, options["load"], days + before, options["seed"])
    history, scored = split_history(jobs, before)
    return history, scored, days, left_out


def _show(found: MigComparison, site: MigSite, left_out: Mapping[str, int]) -> None:
    click.echo(
        f"{format_count(found.jobs)} jobs on {format_count(site.nodes)} nodes with {format_count(site.gpus)} "
        f"{site.model} GPUs; load {found.load:.2f} of the full GPUs"
    )
    for reason, count in sorted(left_out.items()):
        click.echo(f"not simulated: {format_count(count)} rows {reason}")
    rows = [
        [each.policy, short_time(each.wait_s) if each.wait_s < float("inf") else "never all start",
         str(each.changes or ""), each.layout]
        for each in found.results
    ]  # fmt: skip
    show_table(("policy", "mean wait", "changes", "layout at the end"), rows, right=("mean wait", "changes"))
    click.echo(
        f"refused without a queue: first fit {found.refusals.first_fit:.1%}, "
        f"reachability score {found.refusals.reachability:.1%}"
    )


def _as_json(found: MigComparison, site: MigSite, left_out: Mapping[str, int]) -> dict[str, Any]:
    return {
        "jobs": found.jobs,
        "load": found.load,
        "nodes": site.nodes,
        "gpus": site.gpus,
        "left_out": dict(left_out),
        "policies": [
            {
                "policy": each.policy,
                "mean_wait_s": each.wait_s if each.wait_s < float("inf") else None,
                "changes": each.changes,
                "most_changes_of_a_node_in_a_day": each.most_changes_in_a_day,
                "layout": each.layout,
            }
            for each in found.results
        ],
        "refused": {"first_fit": found.refusals.first_fit, "reachability": found.refusals.reachability},
    }
