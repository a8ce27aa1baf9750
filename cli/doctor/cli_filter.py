"""`almanac doctor` on cli_filter.lua: whether every host that needs it has it."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from almanac import bounded
from almanac.errors import AlmanacError, ConfigError
from almanac.plain_file import read_plain
from almanac.units import DAY_S, format_count, format_duration, printable
from cli.app import App
from cli.doctor.findings import Check

NAME = "cli_filter"
SCRIPT = "almanac-cli-filter.sh"
RECORD = "checked-hosts"
"""File beside the configuration file that keeps what SCRIPT said on each host."""
FRESH_S = 30 * DAY_S
_SHOWN = 5
_TIMEOUT_S = 60
HostStatus = Literal["ok", "absent", "broken", "unknown"]
_LINE = re.compile(rf"(?:.*\s)?(\S+) ({'|'.join(get_args(HostStatus))}) (\d{{1,12}})\s*")
_SAID: dict[HostStatus, str] = {
    "ok": "cli_filter.lua is here, and sbatch starts",
    "absent": "cli_filter.lua beside slurm.conf is missing, or not readable by every user",
    "broken": "sbatch, srun, and salloc do not start: CliFilterPlugins=lua needs cli_filter.lua beside slurm.conf",
    "unknown": "sbatch or slurm.conf was not found, or sbatch did not answer",
}


@dataclass(frozen=True)
class HostCheck:
    """What SCRIPT said on a host, and when."""

    host: str
    status: HostStatus
    at_s: int


def check_node(app: App) -> Iterator[Check]:
    """This host only, for `almanac doctor --node` on login and compute nodes. Needs no store."""
    found = _this_host(app)
    todo = (
        ""
        if found.status == "ok"
        else "run `almanac install-hooks --cli-filter --yes` here, or copy cli_filter.lua from another host"
    )
    yield Check(NAME, "ok" if found.status == "ok" else "fail", f"{found.host}: {_SAID[found.status]}", todo)


def check_filter(app: App) -> Iterator[Check]:
    """This host, and the others by the record. Yields nothing without a record and lua in CliFilterPlugins."""
    from telemetry.slurm.commands import controller_config

    try:
        is_on = bool(re.search(r"^CliFilterPlugins\s*=.*\blua\b", controller_config(app.commands), re.MULTILINE))
        nodes = _node_names(app) if is_on or record_path(app).is_file() else []
    except AlmanacError:
        return  # the check of Slurm reports it
    if not nodes:
        return
    known = {check.host: check for check in read_record(record_path(app), app.now_s())}
    here = _this_host(app)
    if here.status != "unknown":  # else no job is submitted from here
        known[here.host] = here
    yield from _findings(nodes, known, is_on, app)


def _findings(
    nodes: Sequence[tuple[str, str]], known: Mapping[str, HostCheck], is_on: bool, app: App
) -> Iterator[Check]:
    """nodes: NodeName and NodeHostName of each compute node."""
    faulty = sorted(check.host for check in known.values() if check.status != "ok")
    # A host that runs several nodes counts for none of them, because each has its own configuration.
    hosts = Counter(host for _, host in nodes)
    unchecked = [name for name, host in nodes if name not in known and (host not in known or hosts[host] > 1)]
    if faulty:
        said = f"srun, sbatch, and salloc {'' if is_on else 'will '}fail without cli_filter.lua on {_named(faulty)}"
        todo = "put cli_filter.lua beside slurm.conf there, then check again (docs/hooks.md)"
        if is_on:
            todo = f"remove lua from CliFilterPlugins until this is fixed: {todo}"
        yield Check(NAME, "fail" if is_on else "warn", said, todo, {"hosts": faulty}, is_blocking=True)
    if unchecked:
        said = f"not checked on {format_count(len(unchecked))} compute nodes: {_named(unchecked)}"
        todo = f"clush -qNw @all sh -s <{_script()} >{record_path(app)}, including login nodes"
        yield Check(NAME, "warn", said, todo, {"hosts": unchecked}, is_blocking=True)
    if not faulty and not unchecked:
        age = format_duration(max(0, app.now_s() - min((check.at_s for check in known.values()), default=0)))
        switch = "" if is_on else "; you can set CliFilterPlugins=lua"
        others = f"{format_count(len(known))} hosts, including all {format_count(len(nodes))} compute nodes"
        yield Check(NAME, "ok", f"cli_filter.lua is on {others}, checked within {age}{switch}")


def record_path(app: App) -> Path:
    return (Path(app.config.source).parent if app.config.source else Path("/etc/almanac")) / RECORD


def read_record(path: Path, now_s: int) -> list[HostCheck]:
    """The checks of the last 30 days, the newest of each host last; other lines (clush's own) are skipped."""
    try:
        lines = read_plain(path).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = (
        HostCheck(match[1], cast(HostStatus, match[2]), int(match[3]))
        for line in lines
        if (match := _LINE.fullmatch(line))
    )
    return sorted((check for check in found if check.at_s > now_s - FRESH_S), key=lambda check: check.at_s)


def _this_host(app: App) -> HostCheck:
    bin_dir = app.config.slurm.bin_dir
    path = ":".join(filter(None, (bin_dir, os.environ.get("PATH", os.defpath))))
    said = ""
    with contextlib.suppress(OSError, ValueError, ConfigError):
        argv, env = ["/bin/sh", str(_script())], {**os.environ, "PATH": path}
        done = bounded.run(argv, timeout_s=_TIMEOUT_S, most_bytes=1 << 20, env=env)
        said = done.stdout.decode("utf-8", "replace")
    if match := _LINE.fullmatch(said):
        return HostCheck(match[1], cast(HostStatus, match[2]), int(match[3]))
    return HostCheck(os.uname().nodename.partition(".")[0], "unknown", app.now_s())


def _script() -> Path:
    import slurm_hooks

    packaged = Path("/usr/libexec/almanac") / SCRIPT
    return packaged if packaged.is_file() else Path(slurm_hooks.__file__).parent / "nodes" / SCRIPT


def _node_names(app: App) -> list[tuple[str, str]]:
    lines = app.commands(["sinfo", "-h", "-N", "-o", "%N %n"]).decode("utf-8", "replace").splitlines()
    return sorted({(words[0], words[1]) for line in lines if len(words := line.split()) == 2})


def _named(names: Sequence[str]) -> str:
    more = f" and {format_count(len(names) - _SHOWN)} more" if len(names) > _SHOWN else ""
    return f"{', '.join(printable(name, 60) for name in names[:_SHOWN])}{more}"
