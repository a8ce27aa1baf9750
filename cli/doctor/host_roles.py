"""`almanac doctor --host`: what one host of a cluster needs, by its role. Needs no store, and no library but click."""

from __future__ import annotations

import os
import pwd
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from almanac.config_file import find_config
from almanac.errors import AlmanacError, FileFormatError
from almanac.plain_file import read_plain
from almanac.units import format_duration, printable
from cli.app import App
from cli.doctor.advice_files import NAME as ADVICE
from cli.doctor.advice_files import check_sched
from cli.doctor.cli_filter import check_node
from cli.doctor.findings import Check, Probe, run_probes
from cli.doctor.priority import check_priority
from cli.doctor.trust import check_trust

COPY = "check almanac-copy.timer (journalctl -u almanac-copy), and `almanac run --list` on almanac's host"


def check_configuration(app: App) -> Iterator[Check]:
    """Raises ConfigError if the file cannot be used."""
    path, _ = find_config(app.config_path), app.config
    yield Check("configuration", "ok", str(path) if path else "no file: all keys have their defaults")
    yield from check_trust(app)


def check_job_submit(app: App) -> Iterator[Check]:
    """Whether slurmctld calls almanac at each submission. Raises CommandError if Slurm does not answer."""
    from slurm_hooks.install.guarded_line import HOOKS, remove
    from telemetry.slurm.commands import controller_config

    name, told = "job_submit", controller_config(app.commands)
    conf = re.search(r"(?m)^SLURM_CONF\s*=\s*(/\S+)", told)
    script = Path(conf[1] if conf else "/etc/slurm/slurm.conf").with_name("job_submit.lua")
    todo = "run `almanac install-hooks --job-submit --yes` here"
    try:
        text = read_plain(script)
    except OSError as error:
        yield Check(name, "fail", f"{script} cannot be read: {error.strerror}", todo)
        return
    if remove(text, HOOKS["job_submit"]) == text:
        yield Check(name, "fail", f"{script} does not call almanac", todo)
    elif not re.search(r"(?m)^JobSubmitPlugins\s*=.*\blua\b", told):
        yield Check(name, "fail", "JobSubmitPlugins does not name lua", "add JobSubmitPlugins=lua to slurm.conf")
    else:
        yield Check(name, "ok", f"{script} calls almanac")


def check_filter_here(app: App) -> Iterator[Check]:
    """cli_filter.lua on this host: it may be missing as long as CliFilterPlugins does not name lua."""
    from telemetry.slurm.commands import controller_config

    try:
        is_on = bool(re.search(r"(?m)^CliFilterPlugins\s*=.*\blua\b", controller_config(app.commands)))
    except AlmanacError:
        is_on = True  # as far as anybody knows
    for check in check_node(app):
        if check.status == "fail" and not is_on:
            said = f"{check.said}; CliFilterPlugins does not name lua, so nothing fails yet"
            yield Check(check.name, "warn", said, f"only if you want the prompt in srun and sbatch: {check.todo}")
        else:
            yield check


def check_sched_group(app: App) -> Iterator[Check]:
    """Whether slurmctld can read its advice: the copy keeps the group's number, and hosts may differ in it."""
    from telemetry.slurm.commands import controller_config

    folder = Path(app.config.hooks.advice_dir) / "sched"
    user = re.search(r"(?m)^SlurmUser\s*=\s*([^\s(]+)", controller_config(app.commands))
    try:
        found, wanted = folder.stat(), pwd.getpwnam(user[1] if user else "slurm")
    except (OSError, KeyError):
        return  # the check of the advice files, or of Slurm, reports it
    if 0 != wanted.pw_uid != found.st_uid and found.st_gid != wanted.pw_gid:
        said = f"{folder} has group {found.st_gid}, and {wanted.pw_name} has group {wanted.pw_gid}: no advice is read"
        todo = "give SlurmUser's group the same number on all hosts, or set SCHED_GROUP in /etc/default/almanac-copy"
        yield Check(ADVICE, "fail", said, todo)


def check_shown(app: App) -> Iterator[Check]:
    """The advice that users of this host see: the site's own file stands for the copy of all files."""
    from almanac.submit_config import SITE
    from slurm_hooks.advice.file import MAX_BYTES, is_of_future, parse
    from slurm_hooks.advice.folder import shown_path
    from telemetry.store.user_files import read_own, writable_by_others

    root = Path(app.config.hooks.advice_dir)
    path = shown_path(root, SITE)
    if faults := writable_by_others(root, os.getuid()):
        yield Check(ADVICE, "fail", "; ".join(faults), "correct owner and mode: users could show others false advice")
    try:
        file = parse(read_own(path, os.getuid(), MAX_BYTES), None)
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
    """almanac's prolog, if slurm.conf names it. Raises CommandError if Slurm does not answer."""
    from telemetry.slurm.commands import controller_config

    named = re.findall(r"(?m)^(Prolog|Epilog)\S*\s*=\s*(/\S*almanac-gpus\.sh)\s*$", controller_config(app.commands))
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
}
"""The checks of each kind of host, by subject. almanac's own host has those of `cli.doctor.main.PROBES`."""


def examine_host(app: App, role: str) -> Iterator[Check]:
    """Run the checks of a role; a check that cannot run fails."""
    return run_probes(app, ROLES[role])
