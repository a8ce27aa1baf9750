"""`almanac doctor`: check what almanac needs, and say how to fix each fault."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import click

from almanac.config_file import find_config
from almanac.hardware import gpu_models
from almanac.removed_keys import said_of
from almanac.units import format_duration, printable
from cli.app import App, has_libraries
from cli.doctor.advice_files import check_advice_files
from cli.doctor.backend import check_backend
from cli.doctor.cli_filter import check_filter, check_node
from cli.doctor.demand import check_demand
from cli.doctor.ended_jobs import check_spool
from cli.doctor.findings import Check, Probe, run_probes
from cli.doctor.gpu_sharing import check_sharing
from cli.doctor.host_roles import ROLES, examine_host
from cli.doctor.mail import check_mail
from cli.doctor.mail_settings import check_rules
from cli.doctor.mig import check_mig
from cli.doctor.mig_slices import check_slices
from cli.doctor.placement import check_placement
from cli.doctor.power import check_power
from cli.doctor.priority import check_priority
from cli.doctor.store import check_store
from cli.doctor.tasks import check_tasks
from cli.doctor.trust import check_trust
from cli.output import json_text

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command("doctor")
@click.option("--verify", is_flag=True, help="Compare all bytes of all files of the store, not only of the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--node", "is_node", is_flag=True, help="Check only whether srun works with cli_filter.lua on this host.")
@click.option("--host", "role", type=click.Choice(["almanac", *ROLES]),
              help="Check what a host of this kind needs. [almanac: the host with the store]")  # fmt: skip
@click.pass_obj
def command(app: App, verify: bool, as_json: bool, is_node: bool, role: str | None) -> int:
    """Check the configuration, store, Slurm, Prometheus, models, hooks, node power, and mail.

    Each finding says how to fix it. The last line says whether the site is ready. Writes nothing. The exit code is 0 if
    no check failed, and 1 otherwise. On hosts without the store, give --host: it checks what belongs on this host.
    """
    app.are_strays_named = False
    checks = list(_findings(app, verify, is_node, role))
    if as_json:
        click.echo(json_text([vars(check) for check in checks]))
    else:
        for check in checks:
            mark, color = MARKS[check.status]
            click.echo(f"{click.style(mark, fg=color)}  {check.name}: {printable(check.said, 1000)}")
            if check.todo:
                click.echo(f"      try: {printable(check.todo, 1000)}")
        if not is_node:
            click.echo(readiness(checks, "host" if role in ROLES else "site"))
    return 1 if any(check.status == "fail" for check in checks) else 0


def _findings(app: App, verify: bool, is_node: bool, role: str | None) -> Iterator[Check]:
    if is_node:
        return check_node(app)
    if role in ROLES:
        return examine_host(app, role)
    if not has_libraries():
        raise click.UsageError(f"slurm-almanac is not installed on this host: give --host {', --host '.join(ROLES)}")
    return examine(app, verify)


def readiness(checks: Sequence[Check], what: str = "site") -> str:
    """One line: whether the site (or this host) is ready, or which checks must pass first."""
    open_names = dict.fromkeys(check.name for check in checks if check.status == "fail" or check.is_blocking)
    subject = "The site" if what == "site" else "This host"
    return f"{subject} is not ready: {', '.join(open_names)}." if open_names else f"{subject} is ready."


def examine(app: App, verify: bool = False) -> Iterator[Check]:
    """Run all checks; each comes after those that it depends on. verify: read every file of the store."""
    return run_probes(app, {**PROBES, "store": functools.partial(check_store, verify=verify)})


def check_config(app: App) -> Iterator[Check]:
    path = find_config(app.config_path)
    tiers = app.config.tiers
    yield Check("configuration", "ok", str(path) if path else "no file: all keys have their defaults")
    if removed := app.config.removed:
        yield Check("configuration", "warn", f"removed keys: {said_of(removed)}", "remove these keys")
    yield from check_trust(app)
    if not tiers:
        yield Check(
            "memory tiers", "warn", "none is configured: no tier is advised", "describe each one in a [[tiers]] table"
        )
    for tier in tiers:
        if tier.gpu_model not in gpu_models():
            known = ", ".join(gpu_models())
            yield Check(
                "memory tiers", "warn", f"{tier.name}: unknown GPU model {tier.gpu_model!r}", f"use one of: {known}"
            )
    if tiers:
        names = ", ".join(f"{tier.name} ({tier.capacity_mib} MiB)" for tier in tiers)
        yield Check("memory tiers", "ok", names)


def check_slurm(app: App) -> Iterator[Check]:
    from telemetry.sources.sacct import check_cluster, probe_accounting

    status = probe_accounting(app.commands)
    yield Check("Slurm", "ok", f"version {status.version}, cluster {status.cluster}")
    if status.tracks_gpus is False:
        todo = "add gres/gpu to AccountingStorageTRES in slurm.conf"
        yield Check("accounting", "fail", "GPUs are not recorded", todo)
    if not status.has_json:
        said = "sacct answers, but sacct --json does not: job names and families are unknown"
        yield Check("accounting", "warn", said, "install Slurm's JSON serializer plugin")
    else:
        yield Check("accounting", "ok", f"sacct answers, {status.jobs_last_day} jobs in the last day")
    named = app.cluster_name or app.config.site.cluster
    if named:
        check_cluster(app.commands, named)


def check_prometheus(app: App) -> Iterator[Check]:
    if not app.config.prometheus.url:
        yield Check("Prometheus", "warn", "not configured", "set prometheus.url, or import telemetry files")
        return
    from cli.doctor.counters import check_counters
    from cli.doctor.hosts import check_hosts
    from telemetry.sources.prometheus_probe import probe

    status = probe(app.config.prometheus)
    yield Check("Prometheus", "ok", f"version {status.version or 'unknown'} answers")
    yield from check_counters(status, app.config.prometheus)
    yield from check_hosts(app, {group.host for group in status.groups} | {one.host for one in status.silent})


def check_bindings(app: App) -> Iterator[Check]:
    from pathlib import Path

    bindings = app.config.bindings
    if bindings.prolog_dir and not Path(bindings.prolog_dir).is_dir():
        todo = "install slurm_hooks/prolog/almanac-gpus.sh as a Slurm Prolog, or clear bindings.prolog_dir"
        yield Check("GPU bindings", "warn", f"{bindings.prolog_dir} is not a folder", todo)
    else:
        on = [name for name, used in (("exporter label", bindings.use_labels), ("prolog", bindings.prolog_dir)) if used]
        yield Check("GPU bindings", "ok", f"from {', '.join([*on, 'squeue'])}")


def check_models(app: App) -> Iterator[Check]:
    from advisor.artefacts import load
    from advisor.lifecycle import faults_of

    store = app.open_store()
    for cluster in store.clusters():
        trained = load(store.of(cluster).models_dir)
        if trained is None:
            yield Check("models", "warn", f"no model is trained for {cluster}", "run `almanac train`")
        else:
            age = format_duration(max(0, app.now_s() - trained.trained_s))
            faults = faults_of(trained, app.config, app.now_s())
            said = f"{cluster}: {trained.jobs} jobs, trained {age} ago"
            if faults:
                todo = "run `almanac train` on a timer; until then, predictions come from each user's last runs"
                yield Check("models", "warn", f"{said}; not used: {'; '.join(faults)}", todo)
            else:
                yield Check("models", "ok", said)


def check_services(app: App) -> Iterator[Check]:
    """The site's own services; yields nothing if there are none."""
    from advisor.services.own import load_own

    own = load_own(app.config.services.extra)
    for name, fault in own.faults.items():
        yield Check(f"service {name}", "fail", fault, "install or correct it, or remove it from services.extra")
    if own.services:
        yield Check("services", "ok", f"loaded: {', '.join(own.services)}")


PROBES: dict[str, Probe] = {
    "configuration": check_config,
    "store": check_store,
    "Slurm": check_slurm,
    "Slurm backend": check_backend,
    "Prometheus": check_prometheus,
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
    "advice files": check_advice_files,
    "cli_filter": check_filter,
    "report rules": check_rules,
    "mail": check_mail,
    "ended jobs": check_spool,
}
