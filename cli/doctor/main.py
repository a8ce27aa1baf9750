"""`almanac doctor`: run the checks of the site or of one host, and print the findings."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from almanac.units import printable
from cli.app import App, folded, has_libraries
from cli.doctor import Check
from cli.doctor.hosts import ROLES, examine_host
from cli.output import json_text

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command("doctor")
@click.option("--verify", is_flag=True, help="Compare all bytes of all files of the store, not only of the newest.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("--host", "role", type=click.Choice(["almanac", *ROLES]),
              help="Check this kind of host; filter: only that srun works. [almanac: has the store]")  # fmt: skip
@click.pass_obj
def doctor(app: App, verify: bool, as_json: bool, role: str | None) -> int:
    """Check the configuration, store, Slurm, Prometheus, models, hooks, node power, and mail.

    Each finding says how to fix it. The last line says whether the site is ready. Writes nothing. The exit code is 0 if
    no check failed, and 1 otherwise. On hosts without the store, give --host: it checks what belongs on this host.
    """
    app.are_strays_named = False
    checks = _findings(app, verify, role)
    if as_json:
        click.echo(json_text([vars(check) for check in checks]))
    else:
        for check in checks:
            mark, color = MARKS[check.status]
            said = folded(f"{mark}  {check.name}: {printable(check.said, 1000)}", sys.stdout, "      ")
            click.echo(click.style(mark, fg=color) + said.removeprefix(mark))
            if check.todo:
                for place, line in enumerate(check.todo.splitlines()):
                    text = f"      {'' if place else 'try: '}{printable(line, 1000)}"
                    click.echo(folded(text, sys.stdout, "      "))
        click.echo(folded(readiness(checks, "host" if role in ROLES else "site"), sys.stdout))
    return 1 if any(check.status == "fail" for check in checks) else 0


def _findings(app: App, verify: bool, role: str | None) -> list[Check]:
    if role in ROLES:
        return examine_host(app, role)
    if not has_libraries():
        raise click.UsageError(f"slurm-almanac is not installed on this host: give --host {', --host '.join(ROLES)}")
    # slurm-almanac-client lacks the libraries of these checks.
    from cli.doctor.site import examine

    return examine(app, verify)


def readiness(checks: Sequence[Check], what: str = "site") -> str:
    """One line: whether the site (or this host) is ready, or which checks must pass first."""
    open_names = dict.fromkeys(check.name for check in checks if check.status == "fail" or check.is_blocking)
    subject = "The site" if what == "site" else "This host"
    return f"{subject} is not ready: {', '.join(open_names)}." if open_names else f"{subject} is ready."
