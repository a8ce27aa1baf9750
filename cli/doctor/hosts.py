"""Checks of one host of a cluster, by its role. They need no store and no library but click."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from advisor.priority import check_ageing
from almanac.config_file import find_config
from almanac.errors import AlmanacError, FileFormatError
from almanac.files import read_plain, trust_fault
from almanac.published.files import is_of_future, read_own, user_folder
from almanac.published.outgoing import writable_by_others
from almanac.submit_config import SITE
from almanac.units import format_duration, printable
from cli.app import App
from cli.doctor import Check, CheckStatus, Probe, run_probes
from cli.doctor.hooks import ADVICE, check_node, check_sched
from slurm.commands import slurm_settings
from slurm_hooks.advice.file import ADVICE as PUBLISHED_ADVICE
from slurm_hooks.install.guarded_line import HOOKS, remove

COPY = "check almanac-copy.timer (journalctl -u almanac-copy), and `almanac run --list` on almanac's host"
SLURM_PROGRAMS = ("sacct", "squeue", "scontrol", "sinfo")


def check_configuration(app: App) -> Iterator[Check]:
    """Yield the configuration file in use, and whether it can be trusted. Raises ConfigError if it cannot be used."""
    path, _ = find_config(app.config_path), app.config
    yield Check("configuration", "ok", str(path) if path else "no file: all keys have their defaults")
    yield from check_trust(app)


def check_trust(app: App) -> Iterator[Check]:
    """Yield a warning for each file, program, and folder above them that others can change; nothing without one."""
    found: dict[str, Check] = {}
    for what, path in _configured_files(app):
        with contextlib.suppress(OSError):  # the check of its subject reports a file that is missing
            if fault := trust_fault(path):
                found.setdefault(str(fault), Check("configuration", "warn", f"{what}: {fault}", fault.hint))
    yield from found.values()


def _configured_files(app: App) -> Iterator[tuple[str, str]]:
    """Name and path of the configuration, and of each file and program that it names."""
    config = app.config
    if config.source:
        yield "the configuration file", config.source
        yield "rules.toml", str(Path(config.source).with_name("rules.toml"))
    programs = {f"slurm.bin_dir ({name})": (name, config.slurm.bin_dir or None) for name in SLURM_PROGRAMS}
    for section in dataclasses.fields(config):
        part = getattr(config, section.name)
        for key in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            value, name = getattr(part, key.name), f"{section.name}.{key.name}"
            if key.name.endswith("_command") and value:
                programs[name] = (value[0], None)
            elif (
                key.name in ("password_file", "token_file", "ca_file", "bmc_file", "address_map", "option_file")
                and value
            ):
                yield name, value
    for name, (program, folder) in programs.items():
        if path := shutil.which(program, path=folder):
            yield name, path


def check_priority(app: App) -> Iterator[Check]:
    """A fault is only a warning until priority.mode is "apply": before that, nothing in Slurm depends on it."""
    priority = app.config.priority
    bad: CheckStatus = "fail" if priority.mode == "apply" else "warn"
    try:
        check = check_ageing(slurm_settings(app.commands), priority)
    except AlmanacError as error:
        yield Check("priority", bad, f"mode {priority.mode}; {error}", error.hint)
        return
    tau = "no tau (age does not count)" if check.tau_s is None else f"a tau of {check.tau_s / 3600:.1f} h"
    details = {"tau_s": check.tau_s, "goal_s": priority.tau_hours * 3600, "lines": check.lines, "faults": check.faults}
    said = f"mode {priority.mode}; Slurm's weights give {tau}, the goal is {priority.tau_hours:g} h"
    if check.fits:
        yield Check("priority", "ok", f"{said}: fits", "", details)
        return
    todo = f"in slurm.conf: {', '.join(check.lines)}"
    if priority.mode == "observe":
        todo = f'before priority.mode = "apply", {todo}'
    yield Check("priority", bad, f"{said}: {'; '.join(check.faults)}", todo, details)


def check_job_submit(app: App) -> Iterator[Check]:
    """Check that slurmctld calls almanac at each submission. Raises CommandError if Slurm does not answer."""
    name, settings = "job_submit", slurm_settings(app.commands)
    script = Path(settings.get("SLURM_CONF") or "/etc/slurm/slurm.conf").with_name("job_submit.lua")
    todo = "run `almanac install-hooks job-submit --yes` here"
    try:
        text = read_plain(script)
    except OSError as error:
        yield Check(name, "fail", f"{script} cannot be read: {error.strerror}", todo)
        return
    if remove(text, HOOKS["job_submit"]) == text:
        yield Check(name, "fail", f"{script} does not call almanac", todo)
    elif "lua" not in settings.words("JobSubmitPlugins"):
        yield Check(name, "fail", "JobSubmitPlugins does not name lua", "add JobSubmitPlugins=lua to slurm.conf")
    else:
        yield Check(name, "ok", f"{script} calls almanac")


def check_filter_here(app: App) -> Iterator[Check]:
    """Check cli_filter.lua on this host: it may be missing as long as CliFilterPlugins does not name lua."""
    try:
        is_on = "lua" in slurm_settings(app.commands).words("CliFilterPlugins")
    except AlmanacError:
        is_on = True  # as far as anybody knows
    for check in check_node(app):
        if check.status == "fail" and not is_on:
            said = f"{check.said}; CliFilterPlugins does not name lua, so nothing fails yet"
            yield Check(check.name, "warn", said, f"only if you want the prompt in srun and sbatch: {check.todo}")
        else:
            yield check


def check_sched_group(app: App) -> Iterator[Check]:
    """Check that slurmctld can read its advice: the copy keeps the group's number, and hosts may differ in it."""
    folder = Path(app.config.hooks.advice_dir) / "sched"
    user, _ = slurm_settings(app.commands).user
    try:
        found, wanted = folder.stat(), pwd.getpwnam(user or "slurm")
    except (OSError, KeyError):
        return  # the check of the advice files, or of Slurm, reports it
    if 0 != wanted.pw_uid != found.st_uid and found.st_gid != wanted.pw_gid:
        said = f"{folder} has group {found.st_gid}, and {wanted.pw_name} has group {wanted.pw_gid}: no advice is read"
        todo = "give SlurmUser's group the same number on all hosts, or set SCHED_GROUP in /etc/default/almanac-copy"
        yield Check(ADVICE, "fail", said, todo)


def check_shown(app: App) -> Iterator[Check]:
    """The advice that users of this host see: the site's own file stands for the copy of all files."""
    root = Path(app.config.hooks.advice_dir)
    path = user_folder(root, SITE) / PUBLISHED_ADVICE.name
    if faults := writable_by_others(root, os.getuid()):
        yield Check(ADVICE, "fail", "; ".join(faults), "correct owner and mode: users could show others false advice")
    try:
        file = PUBLISHED_ADVICE.parse(read_own(path, os.getuid(), PUBLISHED_ADVICE.most_bytes)).value
    except FileNotFoundError:
        yield Check(ADVICE, "warn", f"{path} does not exist: no advice was copied to this host", COPY, is_blocking=True)
        return
    except (OSError, FileFormatError) as error:
        yield Check(ADVICE, "warn", f"{path} is not used: {error}", COPY)
        return
    now_s = app.now_s()
    said = f"{path} was written {format_duration(max(0, now_s - file.written_s))} ago"
    if file.expires_s <= now_s or is_of_future(file, now_s):
        reason = "is in the future: compare the clocks" if is_of_future(file, now_s) else "has expired"
        yield Check(ADVICE, "warn", f"{said}, and {reason}", COPY)
    else:
        yield Check(ADVICE, "ok", said)


def check_mail_folder(app: App) -> Iterator[Check]:
    """Yields nothing if the site sends no mail."""
    folder = Path(app.config.hooks.advice_dir) / "mail"
    if not app.config.mail.server:
        return
    if folder.is_dir():
        yield Check("mail", "ok", f"`almanac mail` writes to {folder}")
    else:
        todo = f"mount {folder} of almanac's host here, or tell users where `almanac mail` works"
        yield Check("mail", "warn", f"{folder} does not exist: `almanac mail` does not work on this host", todo)


def check_prolog(app: App) -> Iterator[Check]:
    """Check almanac's prolog, if slurm.conf names it. Raises CommandError if Slurm does not answer."""
    settings = slurm_settings(app.commands)
    named = [
        (key, text)
        for key in ("Prolog", "Epilog")
        for text in settings.numbered(key)
        if text.endswith("almanac-gpus.sh")
    ]
    if not named:
        yield Check("prolog", "ok", "slurm.conf does not name almanac-gpus.sh: bindings come from other sources")
    for key, text in named:
        path = Path(text)
        mode = path.stat().st_mode if path.is_file() else 0
        if mode & stat.S_IXUSR:
            yield Check("prolog", "ok", f"{key}={printable(text, 200)} is here")
        else:
            said = f"{key}={printable(text, 200)} is not an executable file here: slurmd drains this node"
            yield Check("prolog", "fail", said, "install slurm-almanac-client, or copy the script to this node")


ROLES: dict[str, dict[str, Probe]] = {
    "controller": {
        "configuration": check_configuration,
        "job_submit": check_job_submit,
        ADVICE: check_sched,
        "group of the advice": check_sched_group,
        "priority": check_priority,
        "cli_filter": check_filter_here,
    },
    "login": {
        "configuration": check_configuration,
        "cli_filter": check_filter_here,
        ADVICE: check_shown,
        "mail": check_mail_folder,
    },
    "compute": {"configuration": check_configuration, "cli_filter": check_filter_here, "prolog": check_prolog},
    "filter": {"cli_filter": check_node},
}
"""The checks of each kind of host, by subject. almanac's own host has those of `cli.doctor.site.PROBES`."""


def examine_host(app: App, role: str) -> list[Check]:
    """Run the checks of a role; a check that cannot run fails."""
    return run_probes(app, ROLES[role])
