"""`almanac doctor` on the host with the store: all checks, and those of configuration, store, models, and tasks."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.artefacts import load
from advisor.duration.rank import rank_words
from advisor.from_store import faults_of
from advisor.power.lifecycle import WINDOW_DAYS, budget_alarms, usable_demand
from advisor.power.model import LEAST_DAYS
from advisor.power.versions import trained_sets
from advisor.service import load_own
from almanac.config import NodeSet
from almanac.config_file import find_config, said_of
from almanac.hardware import gpu_models, packaged_models
from almanac.units import DAY_S, counted, format_count, format_duration, format_moment, printable
from cli.app import App
from cli.doctor import Check, Probe, first_few, run_probes
from cli.doctor.hooks import check_advice_files, check_filter, memory_risk
from cli.doctor.hosts import check_priority, check_trust
from cli.doctor.mail import check_mail, check_rules, check_spool
from cli.doctor.nodes import FAILING, check_failing, check_mig, check_power
from cli.doctor.prometheus import check_prometheus
from cli.doctor.slurm import check_backend, check_placement, check_sharing, check_slices, check_slurm
from cli.tasks import list_tasks
from telemetry.ingest import configured_sources
from telemetry.power.demand import load_node_use
from telemetry.retention import expired
from telemetry.site import Site
from telemetry.sources.jobstats_database import JobstatsDatabase
from telemetry.store.database import check_files
from telemetry.store.forgotten import read_forgotten
from telemetry.store.partitions import FORBIDDEN
from telemetry.store.progress import ahead_s, day_text

if TYPE_CHECKING:
    from telemetry.power.demand import NodeUse
    from telemetry.store.partitions import Stray
    from telemetry.store.store import Store


GPU_MEMORY = "GPU memory"
_ACCOUNTED = ("jobstats_hbm_peak_mib", "jobstats_hbm_total_mib", "sacct_hbm_peak_mib")
_GPU_MEMORY_SQL = """
SELECT count(*), count(*) FILTER (coalesce(jobstats_hbm_peak_mib, sacct_hbm_peak_mib) IS NOT NULL),
       count(*) FILTER (coalesce(jobstats_hbm_total_mib, gpu_memory_mib) IS NOT NULL)
FROM jobs WHERE gpu_count > 0 AND end_s >= $since_s AND elapsed_s >= 180
  AND NOT EXISTS (FROM job_metrics WHERE verdict = 'ok' AND submit_s >= $since_s)"""
LATE_S = 3600
"""Six power runs that did not happen."""


def check_store(app: App, verify: bool = False) -> Iterator[Check]:
    store = app.open_store()
    clusters = store.clusters()
    if not clusters:
        yield Check("store", "warn", f"{store.root} holds no jobs yet", "run `almanac ingest`")
        return
    yield Check("store", "ok", f"{store.root} holds {', '.join(clusters)}")
    yield from _check_files(store, verify)
    for site in (app.but(store=store.of(cluster)) for cluster in clusters):
        yield from _check_watermarks(site)
        yield from _check_open_days(site)
        yield from _check_retention(site)
        yield from _check_models(site)
        yield from _check_gpu_memory(site)
    yield from _check_forgotten(store)


def _check_gpu_memory(site: App) -> Iterator[Check]:
    """Say what accounting has of GPUs, if the jobs of a month have no GPU telemetry."""
    with site.store.connect() as db:
        site.store.view(db, "jobs", ["gpu_count", "elapsed_s", "end_s", "gpu_memory_mib", *_ACCOUNTED])
        site.store.view(db, "job_metrics", ["verdict", "submit_s"])
        ((jobs, known, sized),) = db.sql(_GPU_MEMORY_SQL, params={"since_s": site.now_s() - 30 * DAY_S}).fetchall()
    said = f"without telemetry, accounting has it of {format_count(known)} of {counted(jobs, 'GPU job')} of 30 days"
    switch = "set AutoDetect=nvml (or rsmi) in gres.conf, and gather with jobacct_gather/cgroup (docs/install.md)"
    if jobs and known and not sized:
        said += ", but no tier describes their nodes' GPUs, so no tier is advised"
        yield Check(GPU_MEMORY, "warn", said, "describe the memory of your GPUs in [[tiers]]")
    elif jobs:
        yield Check(
            GPU_MEMORY, "ok" if known else "warn", f"{said}; no imbalance, no roofline", "" if known else switch
        )


def _check_files(store: Store, verify: bool) -> Iterator[Check]:
    found = check_files(store.root, None) if verify else check_files(store.root)
    if found.strays:
        said = f"{len(found.strays)} skipped in the store: {_named(store, found.strays)}"
        details = {"strays": [{"path": str(one.path), "reason": one.reason} for one in found.strays]}
        yield Check("strays", "warn", said, "move them out of the store", details)
    files, read = format_count(found.files), format_count(found.read)
    if not found.damaged:
        pages = "all pages match" if found.read == found.files else f"the pages of the newest {read} match"
        more = "" if found.read == found.files else " (--verify reads all)"
        yield Check("store files", "ok", f"{files} files, all with an intact footer; {pages} their checksums{more}")
        return
    yield Check(
        "store files",
        "fail",
        f"{len(found.damaged)} of {files} cannot be read: {_named(store, found.damaged)}",
        _cure(found.damaged[0]),
        {"damaged": [{"path": str(one.path), "reason": one.reason} for one in found.damaged]},
    )


def _cure(damaged: Stray) -> str:
    """The fix for a damaged file, for its day."""
    table, day = damaged.path.parents[2].name, damaged.path.parent.name.removeprefix("date=")
    again = {"jobs": "ingest", "steps": "ingest", "telemetry": "ingest", "bindings": "ingest"} | dict.fromkeys(
        ("job_metrics", "gpu_metrics", "step_metrics"), "summarize"
    )
    if damaged.reason == FORBIDDEN:
        return "run this as the store's owner"
    if table not in again:
        return "restore each from a backup, or move it out of the store: its rows are lost then"
    return (
        f"restore each from a backup; or move it out of the store and read its day again: "
        f"almanac {again[table]} -S {day}T00:00:00Z -E {day}T23:59:59Z (docs/admin.md)"
    )


def _named(store: Store, found: Sequence[Stray]) -> str:
    return first_few([f"{one.path.relative_to(store.root)} ({one.reason})" for one in found])


def _check_watermarks(site: Site) -> Iterator[Check]:
    for source, mark_s in site.store.watermarks().items():
        if ahead := ahead_s(mark_s, site.now_s()):
            yield Check(f"{source} of {site.cluster}", "fail", *_future(mark_s, ahead))
    read = [name for name in configured_sources(site.config) if name == "sacct"]
    for source in [*read, *site.config.prometheus.source_names]:
        mark = site.store.watermark(source)
        if mark is None:
            yield Check(f"{source} of {site.cluster}", "warn", "never read", "run `almanac ingest` on a timer")
            continue
        if ahead_s(mark, site.now_s()):
            continue
        age_s = max(0, site.now_s() - mark)
        late = age_s > DAY_S
        said = f"read up to {format_duration(age_s)} ago"
        yield Check(
            f"{source} of {site.cluster}",
            "warn" if late else "ok",
            said,
            "check why the timer stopped" if late else "",
        )


def _future(mark_s: int, ahead_s: int) -> tuple[str, str]:
    """The finding and the fix for a watermark in the future."""
    said = f"its watermark is {format_moment(mark_s)}, {format_duration(ahead_s)} in the future: a clock was ahead"
    return said, "check this host's clock with `timedatectl`, then run `almanac ingest`, which corrects it"


def _check_open_days(site: Site) -> Iterator[Check]:
    """Stale days that ended at least a day ago; the newest days are always stale."""
    today = site.now_s() // DAY_S
    late = sorted(day for day in site.store.peek_open_days() if day < today - 1)
    if late:
        said = f"{format_count(len(late))} stale {'day' if len(late) == 1 else 'days'}, the oldest {day_text(late[0])}"
        yield Check(f"job metrics of {site.cluster}", "warn", said, "run `almanac summarize`")


def _check_retention(site: Site) -> Iterator[Check]:
    """List the rows that the next summary removes."""
    limits = {table: days for table, days in vars(site.config.retention).items() if days}
    if not limits:
        return
    found = expired(site.store, site.config.retention, site.now_s())
    said = "; ".join(each.line("to remove") for each in found) or "nothing is older than [retention] keeps"
    yield Check(f"retention of {site.cluster}", "ok", said, "", {"expired": [each.as_dict() for each in found]})


def _check_forgotten(store: Store) -> Iterator[Check]:
    """Runs of `almanac forget` that did not remove everything."""
    begun = [each.before_s for each in read_forgotten(store.root).people.values() if each.done_s is None]
    if begun:
        said = f"{counted(len(begun), 'removal')} not finished, begun on {format_moment(min(begun))}"
        yield Check("forgotten users", "fail", said, "run `almanac forget USER --yes` again")


def check_models(app: App) -> Iterator[Check]:
    store = app.open_store()
    for cluster in store.clusters():
        trained = load(store.of(cluster).models_dir)
        if trained is None:
            todo = "run `almanac train`, and its task each day; if it trains nothing, it says what it needs"
            yield Check("models", "warn", f"no model is trained for {cluster}", todo)
        else:
            age = format_duration(max(0, app.now_s() - trained.trained_s))
            faults = faults_of(trained, app.now_s())
            said = f"{cluster}: {trained.jobs} jobs, trained {age} ago"
            if faults:
                todo = "run `almanac train` on a timer; until then, predictions come from each user's last runs"
                yield Check("models", "warn", f"{said}; not used: {'; '.join(faults)}", todo)
            else:
                yield Check("models", "ok", said)
            yield Check("order", "ok", f"{cluster}: {rank_words(trained.rank)}")
            if app.config.tiers:
                yield memory_risk(cluster, trained.calibration, app.config.advice.risk)


def check_demand(app: App) -> Iterator[Check]:
    """Yields nothing without node sets, or with power.mode = "off"."""
    if app.config.power.mode == "off" or not app.config.node_sets:
        return
    if not app.open_store().clusters():
        return
    now_s = app.now_s()
    uses = load_node_use(app.store, (now_s - WINDOW_DAYS * DAY_S, now_s))
    for node_set in app.config.node_sets:
        yield _demand_model(app, node_set, uses.get(node_set.name))
        yield _power_runs(node_set.name, uses.get(node_set.name), now_s)
    yield from _removed_sets(app)


def _demand_model(app: App, node_set: NodeSet, use: NodeUse | None) -> Check:
    name = f"demand of {node_set.name}"
    trained, why = usable_demand(app.store.models_dir, node_set, app.now_s())
    if trained is None:
        days = len({path.parent for path in app.store.files("jobs")})
        todo = "run `almanac train`; it says what it needs if it trains no model of this node set"
        if days < LEAST_DAYS:
            todo = f"wait: training needs {LEAST_DAYS} days of jobs, and the store has {days}"
        return Check(name, "warn", f"no node is powered down: {why}", todo)
    age = format_duration(max(0, app.now_s() - trained.trained_s))
    said = f"trained {age} ago on {(trained.until_s - trained.since_s) / DAY_S:.0f} days"
    alarms = [*trained.drift, *(budget_alarms(use, app.config.power) if use else ())]
    if alarms:
        todo = "see `almanac power status` for what changed; a smaller budget keeps more nodes on"
        return Check(name, "warn", f"{said}; {'; '.join(dict.fromkeys(alarms))}", todo)
    return Check(name, "ok", said)


def _power_runs(name: str, use: NodeUse | None, now_s: int) -> Check:
    name = f"power runs of {name}"
    if use is None or use.newest is None:
        return Check(name, "warn", f"none in the last {WINDOW_DAYS} days", "add the task power on the controller")
    age_s = max(0, now_s - use.newest.time_s)
    said = f"nodes counted {format_duration(age_s)} ago"
    return Check(name, "warn", said, "see `almanac run --list`") if age_s > LATE_S else Check(name, "ok", said)


def _removed_sets(app: App) -> Iterator[Check]:
    """Models of node sets that were renamed or removed."""
    models_dir = app.store.models_dir
    gone = sorted({*trained_sets(models_dir)} - {node_set.name for node_set in app.config.node_sets})
    if gone:
        said = f"models exist for node sets that are not configured: {', '.join(gone)}"
        yield Check(
            "demand models", "warn", said, f"give the set its old name, or remove its folder from {models_dir}/demand"
        )


def check_config(app: App) -> Iterator[Check]:
    path = find_config(app.config_path)
    tiers = app.config.tiers
    yield Check("configuration", "ok", str(path) if path else "no file: all keys have their defaults")
    if removed := app.config.removed:
        yield Check("configuration", "warn", f"removed keys: {said_of(removed)}", "remove these keys")
    yield from check_trust(app)
    if not tiers:
        said = "none is configured: no tier is advised"
        yield Check("memory tiers", "warn", said, "describe each one in a [[tiers]] table")
    for tier in tiers:
        if tier.gpu_model not in gpu_models():
            near = ", ".join(difflib.get_close_matches(tier.gpu_model, gpu_models(), n=4, cutoff=0.0))
            said = f"{tier.name}: unknown GPU model {tier.gpu_model!r}"
            yield Check("memory tiers", "warn", said, f"use one such as {near}, or add it in [[gpu_models]]")
    if tiers:
        names = ", ".join(f"{tier.name} ({tier.capacity_mib} MiB)" for tier in tiers)
        yield Check("memory tiers", "ok", names)


SEEN_DAYS = 30


def _check_models(site: Site) -> Iterator[Check]:
    """Models of the newest jobs' GPUs without peaks, each with an entry to paste; and the site's own entries."""
    for own in site.config.gpu_models:
        also = " instead of almanac's" if own.name in packaged_models() else ""
        yield Check("GPU models", "ok", f"{own.name}: your [[gpu_models]] entry counts{also}")
    columns = ["gpu_model", "mig", "hbm_capacity_mib"]
    rows = site.store.read("gpu_metrics", columns, site.now_s() - SEEN_DAYS * DAY_S).to_pylist()
    seen: dict[str, list[float]] = {}
    for row in rows:
        if row["gpu_model"] and not row["mig"] and row["gpu_model"] not in gpu_models():
            seen.setdefault(row["gpu_model"], []).append(row["hbm_capacity_mib"] or 0.0)
    for name, sizes in sorted(seen.items()):
        said = f"{printable(name, 80)} is not in the table: {counted(len(sizes), 'GPU')} of jobs without flop/s and MFU"
        yield Check("GPU models", "warn", said, f"add to almanac.toml, with its peaks:\n{_entry(name, max(sizes))}")


def _entry(name: str, capacity_mib: float) -> str:
    text = json.dumps(printable(name, 80))
    pipes = (f"{pipe}_flops" for pipe in ("fp64", "fp32", "fp16", "tensor"))
    peaks = ["hbm_bytes_per_s", *pipes, "peak_clock_mhz", "max_power_w"]
    lines = ["[[gpu_models]]", f"name = {text}", f"labels = [{text}]", f"hbm_mib = {capacity_mib or 0:.0f}"]
    return "\n".join([*lines, *(f"# {peak} =" for peak in peaks)])


def check_jobstats(app: App) -> Iterator[Check]:
    """Say whether jobstats' own database answers, if one is configured."""
    if app.config.jobstats.option_file:
        found = JobstatsDatabase(app.config.jobstats, app.cluster).count()
        said, todo = f"its database has {format_count(found)} summaries of {app.cluster}", "check jobstats.table"
        yield Check("jobstats", "ok" if found else "warn", said, "" if found else todo)


def check_bindings(app: App) -> Iterator[Check]:
    bindings = app.config.bindings
    if bindings.prolog_dir and not Path(bindings.prolog_dir).is_dir():
        todo = "install slurm_hooks/prolog/almanac-gpus.sh as a Slurm Prolog, or clear bindings.prolog_dir"
        yield Check("GPU bindings", "warn", f"{bindings.prolog_dir} is not a folder", todo)
    else:
        on = [name for name, used in (("exporter label", bindings.use_labels), ("prolog", bindings.prolog_dir)) if used]
        yield Check("GPU bindings", "ok", f"from {', '.join([*on, 'squeue'])}")


def check_services(app: App) -> Iterator[Check]:
    """The site's own services; yields nothing if there are none."""
    own = load_own(app.config.services.extra)
    for name, fault in own.faults.items():
        yield Check(f"service {name}", "fail", fault, "install or correct it, or remove it from services.extra")
    if own.services:
        yield Check("services", "ok", f"loaded: {', '.join(own.services)}")


def check_tasks(app: App) -> Iterator[Check]:
    """Yields nothing if tasks.toml lists no task."""
    found = [(task, user, last) for task, user, last in list_tasks(app) if user]
    late: dict[str, dict[str, str]] = {}  # of a user, by task
    failed: list[Check] = []
    for task, user, last in found:
        ago = format_duration(max(0, app.now_s() - last.started_s)) if last else ""
        if last is None:
            late.setdefault(user, {})[task.name] = "never ran"
        elif task.is_late(last.started_s, app.now_s()):
            late.setdefault(user, {})[task.name] = f"started last {ago} ago, and runs {task.when}"
        elif last.code:
            todo = f"read why: `journalctl -t almanac-{task.name}`, or /var/log/almanac/{task.name}.log"
            said = f"started {ago} ago, and ended with exit code {last.code}"
            failed.append(Check(f"task {task.name}", "warn", said, todo))
    yield from (_late(user, tasks) for user, tasks in late.items())
    yield from failed
    if found and not late and not failed:
        yield Check("tasks", "ok", f"{', '.join(task.name for task, _, _ in found)} ran as planned")


def _late(user: str, said: Mapping[str, str]) -> Check:
    """One finding for all late tasks of a user: one timer starts them. said: by task."""
    timer = "almanac-root.timer" if user == "root" else "almanac.timer"
    todo = f"run `systemctl enable --now {timer}`, or add the line of {user} from the cron example"
    names = ", ".join(said)
    if len(said) == 1:
        return Check(f"task {names}", "warn", said[names], todo)
    whole = "never ran" if set(said.values()) == {"never ran"} else "did not start when planned"
    return Check(f"tasks of {user}", "warn", f"{names} {whole}", todo, {"tasks": dict(said)})


def examine(app: App, verify: bool = False) -> list[Check]:
    """Run all checks; each comes after those that it depends on. verify: read every file of the store."""
    return run_probes(app, {**PROBES, "store": functools.partial(check_store, verify=verify)})


PROBES: dict[str, Probe] = {
    "configuration": check_config,
    "store": check_store,
    "Slurm": check_slurm,
    "Slurm backend": check_backend,
    "Prometheus": check_prometheus,
    "jobstats": check_jobstats,
    "GPU bindings": check_bindings,
    "models": check_models,
    "services": check_services,
    "tasks": check_tasks,
    "MIG slices": check_slices,
    "GPU sharing": check_sharing,
    "priority": check_priority,
    "power": check_power,
    "MIG layouts": check_mig,
    "placement": check_placement,
    "node demand": check_demand,
    FAILING: check_failing,
    "advice files": check_advice_files,
    "cli_filter": check_filter,
    "report rules": check_rules,
    "mail": check_mail,
    "ended jobs": check_spool,
}
