"""`almanac waits`: how long a job would wait now, by GPU type and number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from almanac.units import format_count, format_duration
from cli.app import App
from cli.output import json_text, show_table

if TYPE_CHECKING:
    from slurm_hooks.advice.waits import GatheredWaits


@click.command("waits")
@click.option("--publish", "is_published", is_flag=True, help="Write the waits file that submit hosts read.")
@click.option("--advice-dir", metavar="DIR", help="Root folder of the advice files. [hooks.advice_dir]")
@click.option("--json", "as_json", is_flag=True, help="Print the waits as JSON.")
@click.pass_obj
def command(app: App, is_published: bool, advice_dir: str | None, as_json: bool) -> None:
    """Estimate how long a job would wait now, by GPU type and number of GPUs. For operators, and a timer.

    Reads Slurm's queue and nodes, predicts what is left of each running job and how long each waiting job will run, and
    plays the queue forward in Slurm's order of priority. With --publish, writes one small file that anyone can read. It
    holds totals only, and advice uses it for 10 minutes.

    Jobs that Slurm holds are left out. Without a trained model, your users' past runs and time limits predict.
    """
    app.require_operator("the queue holds all users' jobs")
    from cli.root_part import hand_out, leave_root
    from slurm_hooks.advice.waits import gather, publish_waits, read_live_queue
    from telemetry.store.outgoing import outgoing_of

    target = Path(advice_dir or app.config.hooks.advice_dir).absolute()

    def give(cluster: str | None = app.cluster_name) -> None:
        if is_published:
            hand_out(app.config, app.store_root, cluster, target, is_quiet=True)

    is_child = leave_root(app.store_root, give)

    store = app.cluster_store()
    backend, now_s = app.backend, app.now_s()
    queue = read_live_queue(app.commands, store.cluster)
    found = gather(queue, backend.nodes(), _predictor(app), app.config, now_s)
    if is_published:
        publish_waits(outgoing_of(store), found.file)
        if not is_child:
            give(store.cluster)
    if as_json:
        click.echo(json_text(_as_json(found)))
    else:
        _show(found, is_published)


def _predictor(app: App) -> Any:
    """A function that predicts the run times of many submissions."""
    from advisor.artefacts import load
    from advisor.lifecycle import trusted
    from advisor.services.gpu_time import durations_of
    from telemetry.history import load_history

    store = app.cluster_store()
    trained = trusted(load(store.models_dir), app.config, app.now_s())

    def predict(requests: Sequence[Any]) -> Sequence[Any]:
        history = load_history(store, user={request.user for request in requests}, running=True)
        return durations_of(requests, history, trained, app.config)

    return predict


def _show(found: GatheredWaits, is_published: bool) -> None:
    columns = ["type", "GPUs", "wait", "low", "high"]
    cells = [
        [wait.gpu_type, str(size), *(format_duration(each) for each in (wait.wait_s, wait.low_s, wait.high_s))]
        for size, wait in found.file.waits
    ]
    show_table(columns, cells, right=columns[1:])
    click.echo(f"{format_count(found.running)} running and {format_count(found.waiting)} waiting GPU jobs")
    if found.unpredicted:
        click.echo(f"  {format_count(found.unpredicted)} without a prediction: their time limits count")
    if found.unreadable:
        click.echo(f"  {format_count(found.unreadable)} records of the queue cannot be read")
    click.echo("waits file written" if is_published else "nothing was written; use --publish")


def _as_json(found: GatheredWaits) -> dict[str, Any]:
    return {
        "as_of_s": found.file.as_of_s,
        "waits": [
            {"type": wait.gpu_type, "gpus": size, "wait_s": wait.wait_s, "low_s": wait.low_s, "high_s": wait.high_s}
            for size, wait in found.file.waits
        ],
        "running": found.running,
        "waiting": found.waiting,
        "unpredicted": found.unpredicted,
        "unreadable": found.unreadable,
    }
