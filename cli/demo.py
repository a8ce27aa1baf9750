"""`almanac demo`: the whole path on a generated site: ingest, metrics, training, advice, reports, node power."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from advisor.power.decide import Spent
from advisor.power.forecast import HORIZON, QUANTILE, STEP_MIN
from advisor.power.lifecycle import usable_demand
from advisor.power.model import TAIL_MIN
from almanac.atomic import make_folders, write_atomically
from almanac.config import NodeSet
from almanac.errors import StoreError
from almanac.units import format_count, format_moment
from cli.advise import command as advise
from cli.app import App
from cli.backtest_power import power
from cli.ingest import run, show
from cli.models import node_names
from cli.output import show_table
from cli.report import command as report
from cli.site_report import command as site_report
from cli.summarize import run as summarize
from cli.train import command as train
from demo import GeneratedSource, SiteShape
from telemetry.history import load_history, load_history_table
from telemetry.ingest import SourceSpan
from telemetry.power.demand import demand_series

if TYPE_CHECKING:
    import pandas as pd

    from advisor.power.model import PowerDecision


"""Days without a wake-up before the plan, because the plan depends on the rest of the budget."""
POWER_COLUMNS = ("node set", "nodes", "in use", "forecast", "keep on", "power down", "why")


def show_power(app: App) -> None:
    """A back-test of the first node set, and the plan of each set at the end of its record."""
    backtest = ["--node-set", app.config.node_sets[0].name]
    click.echo(click.style(f"\n  $ almanac backtest power {' '.join(backtest)}", dim=True))
    power.main(args=backtest, standalone_mode=False, obj=app)
    rows, until_s = [], 0
    for node_set in app.config.node_sets:
        row, end_s = _plan(app, node_set)
        rows.append(row)
        until_s = max(until_s, end_s)
    hours = HORIZON * STEP_MIN // 60
    click.echo(f"\nPlan at {format_moment(until_s)}, if all nodes are on.")
    click.echo(
        f"forecast: highest number of nodes in use within {hours} h, at most so many {QUANTILE:.0%} of the time."
    )
    show_table(POWER_COLUMNS, rows, right=POWER_COLUMNS[1:-1])


def _plan(app: App, node_set: NodeSet) -> tuple[list[str], int]:
    """A row of the table, and the end of the record, s since 1970."""
    store, names = app.store, node_names(app, node_set)
    trained, why = usable_demand(store.models_dir, node_set, app.now_s())
    if trained is None:
        return [node_set.name, str(len(names)), *["-"] * 4, why], 0
    since_s = trained.until_s - TAIL_MIN * 60
    series = demand_series(store, node_set, names, since_s, trained.until_s)
    decision = trained.model.decide(series, len(names), Spent())
    return [node_set.name, str(len(names)), f"{series.active[-1]:.0f}", *_numbers(decision, len(names)),
            decision.reason], trained.until_s  # fmt: skip


def _numbers(decision: PowerDecision, total: int) -> list[str]:
    shown = [f"{min(nodes, total):.0f}" for nodes in decision.forecast.values()] or ["-"]
    kept = total if decision.target is None else decision.target
    return [*shown, str(kept), str(max(total - kept, 0))]


TIERS = """
[[tiers]]
name = "hbm40g"
capacity_mib = 40960
gpu_model = "A100-40"
constraint = "hbm40g"

[[tiers]]
name = "hbm80g"
capacity_mib = 81920
gpu_model = "A100-80"
constraint = "hbm80g"
"""
NODE_SETS = """
# So few nodes, with jobs of up to four of them, cannot sleep at the default budget.
[power]
boots_per_node = 1.0
short_min_per_day = 20.0

[[node_sets]]
name = "hbm40g"
nodes = "nid[001001-001014]"

[[node_sets]]
name = "hbm80g"
nodes = "nid[008193-008200]"
"""
FIRST_LINE = "# Written by `almanac demo`: the generated site's two memory tiers, and the account of its staff."
CONFIG = f"""\
{FIRST_LINE}
[site]
cluster = "demo"

[filters]
staff_accounts = ["nstaff"]
{TIERS}{NODE_SETS}"""


@click.command("demo")
@click.option("--dir", "folder", default="almanac-demo", show_default=True, type=click.Path(path_type=Path))
@click.pass_obj
def command(app: App, folder: Path) -> None:
    """Generate a small GPU site, ingest it, train on it, advise its users, report on a job, and plan node power.

    Writes a configuration and a store to --dir. You can then try every other command on them.
    """
    demo = _prepare(folder)
    started = time.monotonic()
    _step("1. Ingest two weeks of a generated site: jobs, and GPU counters every 10 s")
    _generate(demo)
    _step("2. Join the samples to jobs, and compute the metrics of each job")
    _summarize(demo)
    _step("3. Train the predictors, and score them on the newest fifth of the jobs")
    _train(demo)
    _step("4. Advise users before their next submission")
    _advise(demo)
    _step("5. Report on a job that left GPUs idle, and on the whole site")
    _report(demo, folder)
    _step("6. Replay node power saving, and plan the next step")
    show_power(demo)
    click.echo(f"\nThe demo took {time.monotonic() - started:.0f} s. To explore its site, in {folder}:")
    click.echo(f"  export ALMANAC_CONFIG={shlex.quote(str(folder.resolve() / 'almanac.toml'))}")
    click.echo(f"  export ALMANAC_STORE={shlex.quote(str(folder.resolve() / 'store'))}")
    click.echo(f"  {shlex.quote(sys.argv[0])} jobs -a -n 20")


def _prepare(folder: Path) -> App:
    """Make an empty demo folder with its configuration. Replaces an earlier demo, but no other files."""
    config = folder / "almanac.toml"
    _require_own(folder)
    if folder.exists() and any(folder.iterdir()) and not _is_demo(config):
        raise StoreError(f"{folder} holds files that no demo wrote", "choose another folder with --dir")
    shutil.rmtree(folder / "store", ignore_errors=True)
    make_folders(folder)
    write_atomically(config, CONFIG.encode())
    return App(config_path=str(config), store_path=str(folder / "store"))


def _require_own(folder: Path) -> None:
    """Raises StoreError if another user could change the folder's content while the demo runs, or if the folder is
    another user's link: in /tmp, that link would choose where the demo writes.
    """
    is_foreign_link = folder.is_symlink() and folder.lstat().st_uid != os.geteuid()
    is_foreign = folder.exists() and (folder.stat().st_uid != os.geteuid() or folder.stat().st_mode & 0o002)
    if is_foreign_link or is_foreign:
        raise StoreError(
            f"{folder} belongs to another user, or others can write to it", "choose another folder with --dir"
        )


def _is_demo(config: Path) -> bool:
    """Return True if a demo wrote it: a site's own almanac.toml may have its store in the same folder."""
    return config.is_file() and config.read_text(encoding="utf-8", errors="replace").startswith(FIRST_LINE)


def _step(text: str) -> None:
    click.echo(click.style(f"\n{text}", bold=True))


def _generate(app: App) -> None:
    import dataclasses

    shape = SiteShape.demo(1)
    # The site ends today, so that its history is recent enough to advise from.
    shape = dataclasses.replace(shape, start_s=(app.now_s() // 86400) * 86400 - round(shape.days) * 86400)
    store = app.create_store()
    outcome = run(store, [SourceSpan(GeneratedSource(shape), shape.start_s, shape.end_s)])
    show(outcome, None, as_json=False)


def _summarize(app: App) -> None:
    for line in summarize(app).lines():
        click.echo(line)


def _train(app: App) -> None:
    train.main(args=[], standalone_mode=False, obj=app)


def _advise(app: App) -> None:
    history = load_history(app.store)
    for about, submission in _cases(history):
        click.echo(f"\n{about}")
        click.echo(click.style(f"  $ almanac advise {shlex.join(submission)}", dim=True))
        advise.main(args=submission, standalone_mode=False, obj=app)


def _report(app: App, folder: Path) -> None:
    """Report on the newest job that left a GPU idle, on the terminal and as a page."""
    columns = ("job_id", "end_s", "gpu_count", "idle_gpu_count")
    rows = load_history_table(app.store, columns).to_pylist()
    wasteful = [row for row in rows if 1 <= (row["idle_gpu_count"] or 0) < row["gpu_count"]]
    if not wasteful:
        click.echo("no job left a GPU idle")
        return
    job_id = str(max(wasteful, key=lambda row: (row["end_s"], row["job_id"]))["job_id"])
    click.echo(click.style(f"\n  $ almanac report {job_id}", dim=True))
    report.main(args=[job_id], standalone_mode=False, obj=app)
    page = str(folder / "report.html")
    report.main(args=[job_id, "--html", page], standalone_mode=False, obj=app)
    click.echo(f"  the same report as a page: {page}")
    site_report.main(args=["--html", str(folder / "site.html")], standalone_mode=False, obj=app)


def _cases(history: pd.DataFrame) -> list[tuple[str, list[str]]]:
    """A user who asks for too much, one who needs it, one whose framework reserves memory, and a newcomer."""
    asked = history[history["tier"] == "hbm80g"]
    families = asked.groupby(["user", "name_key", "gpu_count"]).agg(
        runs=("job_id", "size"),
        informative=("hbm_peak_mib", "count"),
        peak=("hbm_peak_mib", "max"),
        reserved=("hbm_evidence", lambda evidence: (evidence == "preallocated").mean()),
        name=("name", "last"),
    )
    often = families[families["informative"] >= 10]
    chosen = [
        ("A user who asks for 80 GB out of habit:", often[often["peak"] < 30000].nlargest(1, "runs")),
        ("A user who needs what they ask for:", often[often["peak"] > 50000].nlargest(1, "runs")),
        ("A user whose framework reserves memory:", families[families["reserved"] == 1.0].nlargest(1, "runs")),
    ]
    cases = [(about, _submission(row.index[0][0], row.index[0][2], row.iloc[0])) for about, row in chosen if len(row)]
    return [*cases, ("A newcomer:", ["--user", "newcomer", "-J", "first-try", "--gpus=4", "-C", "gpu&hbm80g"])]


def _submission(user: str, gpus: int, family: Any) -> list[str]:
    return [
        "--user",
        user,
        "-J",
        str(family["name"]),
        f"--gpus={format_count(int(gpus))}",
        "-C",
        "gpu&hbm80g",
    ]
