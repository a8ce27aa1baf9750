"""`almanac doctor` on the hooks: the advice files that Slurm and users read, and cli_filter.lua on every host."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast, get_args

import slurm_hooks
from almanac import bounded
from almanac.atomic import opened
from almanac.errors import AlmanacError, ConfigError, FileFormatError
from almanac.files import read_plain
from almanac.published.files import is_of_future, user_folder
from almanac.published.outgoing import PUBLISHED, writable_by_others
from almanac.submit_config import SITE
from almanac.units import DAY_S, format_count, format_duration, format_gib, printable
from cli.app import App
from cli.doctor import Check, first_few
from slurm.commands import slurm_settings
from slurm.nodes import node_hosts
from slurm_hooks.advice.file import LIFETIME_S
from slurm_hooks.advice.sched import FIRST_LINES, LINES, MAX_BYTES, SchedHead, head_of
from slurm_hooks.distribute import MODE, SCHED, SCHED_FILE_MODE, SCHED_MODE, USER
from slurm_hooks.root_files import surplus

if TYPE_CHECKING:
    from advisor.memory.calibration import Calibration

ADVICE, FILTER = "advice files", "cli_filter"
_WAIT_S = 600
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFSOCK: "a socket"}
_OTHERS, _NO_COPY = "can be read or written by others: chmod 640", "have no copy, or a different one, in user/"


def memory_risk(cluster: str, calibration: Calibration, accepted: float) -> Check:
    """Compare the accepted risk with the measured one."""
    name, said, found = f"memory risk of {cluster}", calibration.told_risk(accepted), calibration.measured
    if calibration.risk != accepted:
        return Check(name, "warn", said, "run `almanac train`")
    if found is not None and found.low > accepted:
        return Check(name, "warn", f"more than accepted: {said}", "see `almanac backtest tier` for who exceeds it")
    return Check(name, "ok", said, "", {"accepted": accepted, "measured": found and vars(found)})


def check_advice_files(app: App, are_shown: bool = True) -> Iterator[Check]:
    """Check the published advice files; it is fine if nothing is published yet.

    are_shown: each file needs its copy in user/.
    """
    root = Path(app.config.hooks.advice_dir)
    try:
        if not root.exists():
            yield Check(ADVICE, "ok", f"{root} does not exist: `almanac publish` has not run")
            return
        owner = root.stat().st_uid
        faults = writable_by_others(root, owner)
        if faults:
            todo = "correct owner and mode: other users who can write there can stop slurmctld"
            yield Check(ADVICE, "fail", "; ".join(faults), todo)
        yield from _check_modes(root)
        yield from _check_entries(app, root, are_shown)
        yield from _check_fillers(root, owner)
        yield from _check_waiting(app, root)
    except OSError as error:
        todo = "run doctor as root" if os.geteuid() else "correct its rights, or unmount what is mounted there"
        yield Check(ADVICE, "warn", f"{printable(str(error.filename))} cannot be read: {error.strerror}", todo)


def check_sched(app: App) -> Iterator[Check]:
    """The advice on a controller, which may have no copies for users."""
    if (Path(app.config.hooks.advice_dir) / "sched").exists():
        yield from check_advice_files(app, are_shown=False)
    else:
        todo = "set SCHED_SOURCE in /etc/default/almanac-copy, and enable almanac-copy.timer"
        said = f"{app.config.hooks.advice_dir}/sched does not exist: job_submit has no advice"
        yield Check(ADVICE, "warn", said, todo, is_blocking=True)


def _check_modes(root: Path) -> Iterator[Check]:
    for path, mode in ((root, MODE), (root / SCHED, SCHED_MODE), (root / USER, MODE)):
        found = stat.S_IMODE(path.stat().st_mode) if path.is_dir() else None
        if found is not None and found != mode:
            yield Check(ADVICE, "warn", f"{path} has mode {found:04o}, expected {mode:04o}", f"chmod {mode:o} {path}")


def _check_fillers(root: Path, owner: int) -> Iterator[Check]:
    """Users with files below the folder that can grow, the largest first: those that `almanac-distribute` mends."""
    sizes, hidden, user = Counter[int](), list[str](), root / "user"

    def hide(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            hidden.append(f"user/{error.filename}")

    for folder, _, names, handle in os.fwalk(user, onerror=hide) if user.is_dir() else ():
        about = os.fstat(handle)
        if about.st_uid != owner or about.st_mode & 0o022:
            yield Check(ADVICE, "warn", f"{printable(folder)}: others can write to it", "run `almanac-distribute`")
        for name in names:
            try:
                found = os.stat(name, dir_fd=handle, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                hidden.append(f"{Path(folder).relative_to(root)}/{name}")
                continue
            if found.st_uid != owner:
                sizes[found.st_uid] += found.st_blocks * 512
    with contextlib.suppress(FileNotFoundError), opened(root / "mail") as mail:
        for name, extra in surplus(mail):
            if extra:
                sizes[extra.st_uid] += extra.st_blocks * 512
            else:
                hidden.append(f"mail/{name}")
    if hidden:
        todo = "unmount what users have mounted there: umount -l"
        yield Check(ADVICE, "warn", f"{first_few(hidden)} in {root} cannot be looked at", todo)
    if sizes:
        named = ", ".join(f"uid {uid} ({format_gib(size / 2**20)})" for uid, size in sizes.most_common(5))
        todo = "run `almanac-distribute`; use a file system with POSIX ACLs, or with quotas, for hooks.advice_dir"
        yield Check(ADVICE, "warn", f"{format_count(len(sizes))} users own files that they can fill: {named}", todo)


def _check_waiting(app: App, root: Path) -> Iterator[Check]:
    """Warn if files of `almanac publish` wait for root's program."""
    written = [path.stat().st_mtime for path in (app.store_root / PUBLISHED).glob(f"*/user/{SITE}/advice")]
    placed = user_folder(root, SITE) / LINES
    since_s = app.now_s() - max(written, default=app.now_s())
    if written and since_s > _WAIT_S and (not placed.exists() or placed.stat().st_mtime < int(max(written))):
        todo = "add the task distribute for root, or run `almanac-distribute` as root after each `almanac publish`"
        said = f"advice of {format_duration(since_s)} ago waits to be distributed: users and Slurm have older files"
        yield Check(ADVICE, "warn", said, todo)


def _is_shown(root: Path, name: str, content: bytes) -> bool:
    """Return True if the user's copy seems to be that content, by its type and size."""
    with contextlib.suppress(OSError):
        found = (user_folder(root, name) / LINES).lstat()
        return stat.S_ISREG(found.st_mode) and found.st_size == len(content)
    return False


def _check_entries(app: App, root: Path, are_shown: bool) -> Iterator[Check]:
    """Check every entry of sched/: its kind, and whether job_submit can use it."""
    files: list[SchedHead] = []
    faults: defaultdict[str, list[str]] = defaultdict(list)
    sched = root / SCHED
    for path in sorted(sched.iterdir()) if sched.is_dir() else ():
        name = path.name
        try:
            found = path.lstat()
        except FileNotFoundError:
            continue  # taken away by a publisher that runs now
        kind = stat.S_IFMT(found.st_mode)
        if kind != stat.S_IFREG:
            yield _not_regular(path, kind)
            continue
        if stat.S_IMODE(found.st_mode) & ~SCHED_FILE_MODE:
            faults[_OTHERS].append(name)
        if name != SITE and not name.isdecimal():
            faults["are not advice files: remove them"].append(name)
            continue
        try:
            with path.open("rb") as opened_file:
                content = opened_file.read(MAX_BYTES + 1)
            file = head_of(content)
        except FileFormatError as error:
            is_other = not content.startswith(FIRST_LINES)
            faults["have another format" if is_other else f"are not used: {error}"].append(name)
            continue
        if is_of_future(file, app.now_s()):
            faults["are not used: their timestamps are in the future, because a clock was ahead"].append(name)
        else:
            files.append(file)
        if file.expires_s <= app.now_s():
            faults["have expired"].append(name)
        if are_shown and not _is_shown(root, name, content):
            faults[_NO_COPY].append(name)
    for what, names in faults.items():
        todo = "run `almanac-distribute`" if what in (_OTHERS, _NO_COPY) else "run `almanac publish`"
        yield Check(ADVICE, "warn", f"{first_few(names)} {what}", todo)
    yield from _check_whole(app, files)


def _not_regular(path: Path, kind: int) -> Check:
    what = _KINDS.get(kind, "not a regular file")
    danger = ": slurmctld hangs when it opens this, until somebody writes to it" if kind == stat.S_IFIFO else ""
    name = printable(str(path))
    return Check(ADVICE, "fail", f"{name} is {what}{danger}", f"remove it: rm -r {name}")


def _check_whole(app: App, known: Sequence[SchedHead]) -> Iterator[Check]:
    if not known:
        yield Check(ADVICE, "warn", "no file is usable", "run `almanac publish` on a timer")
        return
    age_s = max(0, app.now_s() - max(file.written_s for file in known))
    is_late = age_s > LIFETIME_S / 2
    todo = "check the tasks publish and distribute with `almanac run --list`" if is_late else ""
    said = f"{format_count(len(known))} files, the newest written {format_duration(age_s)} ago"
    yield Check(ADVICE, "warn" if is_late else "ok", said, todo)
    modes, wanted = sorted({file.mode for file in known}), app.config.priority.mode
    if modes != [wanted]:
        said = f"the files have mode {' and '.join(modes)}, the configuration has {wanted}"
        yield Check(ADVICE, "warn", said, "run `almanac publish`, which says why")


SCRIPT = "almanac-cli-filter.sh"
RECORD = "checked-hosts"
"""File next to the configuration file that keeps the output of SCRIPT on each host."""
FRESH_S = 30 * DAY_S
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
    """Output of SCRIPT on a host, and its time."""

    host: str
    status: HostStatus
    at_s: int


def check_node(app: App) -> Iterator[Check]:
    """Check the filter of this host, for `almanac doctor --host filter` on login and compute nodes. Needs no store."""
    found = _this_host(app)
    said = f"{found.host}: {_SAID[found.status]}"
    todo = "run `almanac install-hooks cli-filter --yes` here, or copy cli_filter.lua from another host"
    yield Check(FILTER, "ok", said) if found.status == "ok" else Check(FILTER, "fail", said, todo)


def check_filter(app: App) -> Iterator[Check]:
    """Check the filter of this host, and of the others by the record.

    Yields nothing without a record and lua in CliFilterPlugins.
    """
    try:
        is_on = "lua" in slurm_settings(app.commands).words("CliFilterPlugins")
        nodes = node_hosts(app.commands) if is_on or record_path(app).is_file() else []
    except AlmanacError:
        return  # the check of Slurm reports it
    if not nodes:
        return
    known = {check.host: check for check in read_record(record_path(app), app.now_s())}
    here = _this_host(app)
    if here.status != "unknown":  # else no job is submitted from here
        known[here.host] = here
    yield from _filter_findings([(node.name, node.host) for node in nodes], known, is_on, app)


def _filter_findings(
    nodes: Sequence[tuple[str, str]], known: Mapping[str, HostCheck], is_on: bool, app: App
) -> Iterator[Check]:
    """nodes: NodeName and NodeHostName of each compute node."""
    faulty = sorted(check.host for check in known.values() if check.status != "ok")
    # A host that runs several nodes counts for none of them, because each has its own configuration.
    hosts = Counter(host for _, host in nodes)
    unchecked = [name for name, host in nodes if name not in known and (host not in known or hosts[host] > 1)]
    if faulty:
        said = f"srun, sbatch, and salloc {'' if is_on else 'will '}fail without cli_filter.lua on {first_few(faulty)}"
        todo = "put cli_filter.lua beside slurm.conf there, then check again (docs/hooks.md)"
        if is_on:
            todo = f"remove lua from CliFilterPlugins until this is fixed: {todo}"
        yield Check(FILTER, "fail" if is_on else "warn", said, todo, {"hosts": faulty}, is_blocking=True)
    if unchecked:
        said = f"not checked on {format_count(len(unchecked))} compute nodes: {first_few(unchecked)}"
        todo = f"clush -qNw @all sh -s <{_script()} >{record_path(app)}, including login nodes"
        yield Check(FILTER, "warn", said, todo, {"hosts": unchecked}, is_blocking=True)
    if not faulty and not unchecked:
        age = format_duration(max(0, app.now_s() - min((check.at_s for check in known.values()), default=0)))
        switch = "" if is_on else "; you can set CliFilterPlugins=lua"
        others = f"{format_count(len(known))} hosts, including all {format_count(len(nodes))} compute nodes"
        yield Check(FILTER, "ok", f"cli_filter.lua is on {others}, checked within {age}{switch}")


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
    packaged = Path("/usr/libexec/almanac") / SCRIPT
    return packaged if packaged.is_file() else Path(slurm_hooks.__file__).parent / "lua" / SCRIPT
