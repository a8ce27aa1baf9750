"""`almanac doctor` on the advice files: who can write to them, and whether they are complete and current."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from almanac.errors import FileFormatError
from almanac.submit_config import SITE
from almanac.units import format_count, format_duration, format_gib, printable
from cli.app import App
from cli.doctor.findings import Check
from slurm_hooks.advice.file import LIFETIME_S

if TYPE_CHECKING:
    from slurm_hooks.advice.file import AdviceFile

NAME = "advice files"
_SHOWN = 5
_WAIT_S = 600
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFSOCK: "a socket"}
_OTHERS, _NO_COPY = "can be read or written by others: chmod 640", "have no copy, or a different one, in user/"


def check_advice_files(app: App, are_shown: bool = True) -> Iterator[Check]:
    """It is fine if nothing is published yet. are_shown: each file needs its copy in user/."""
    from telemetry.store.user_files import writable_by_others

    root = Path(app.config.hooks.advice_dir)
    try:
        if not root.exists():
            yield Check(NAME, "ok", f"{root} does not exist: `almanac publish` has not run")
            return
        owner = root.stat().st_uid
        faults = writable_by_others(root, owner)
        if faults:
            yield Check(
                NAME,
                "fail",
                "; ".join(faults),
                "correct owner and mode: other users who can write there can stop slurmctld",
            )
        yield from _check_modes(root)
        yield from _check_entries(app, root, are_shown)
        yield from _check_fillers(root, owner)
        yield from _check_waiting(app, root)
    except OSError as error:
        todo = "run doctor as root" if os.geteuid() else "correct its rights, or unmount what is mounted there"
        yield Check(NAME, "warn", f"{printable(str(error.filename))} cannot be read: {error.strerror}", todo)


def check_sched(app: App) -> Iterator[Check]:
    """The advice on a controller, which may have no copies for users."""
    if (Path(app.config.hooks.advice_dir) / "sched").exists():
        yield from check_advice_files(app, are_shown=False)
    else:
        todo = "set SCHED_SOURCE in /etc/default/almanac-copy, and enable almanac-copy.timer"
        said = f"{app.config.hooks.advice_dir}/sched does not exist: job_submit has no advice"
        yield Check(NAME, "warn", said, todo, is_blocking=True)


def _check_modes(root: Path) -> Iterator[Check]:
    from slurm_hooks.distribute import MODE, SCHED, SCHED_MODE, USER

    for path, mode in ((root, MODE), (root / SCHED, SCHED_MODE), (root / USER, MODE)):
        found = stat.S_IMODE(path.stat().st_mode) if path.is_dir() else None
        if found is not None and found != mode:
            yield Check(NAME, "warn", f"{path} has mode {found:04o}, expected {mode:04o}", f"chmod {mode:o} {path}")


def _check_fillers(root: Path, owner: int) -> Iterator[Check]:
    """Users with files below the folder that can grow, the largest first: those that `almanac-distribute` mends."""
    from slurm_hooks.mail_folder import surplus
    from telemetry.store.atomic import opened

    sizes, hidden, user = Counter[int](), list[str](), root / "user"

    def hide(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            hidden.append(f"user/{error.filename}")

    for folder, _, names, handle in os.fwalk(user, onerror=hide) if user.is_dir() else ():
        about = os.fstat(handle)
        if about.st_uid != owner or about.st_mode & 0o022:
            yield Check(NAME, "warn", f"{printable(folder)}: others can write to it", "run `almanac-distribute`")
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
        yield Check(NAME, "warn", f"{_named(hidden)} in {root} cannot be looked at", todo)
    if sizes:
        named = ", ".join(f"uid {uid} ({format_gib(size / 2**20)})" for uid, size in sizes.most_common(_SHOWN))
        todo = "run `almanac-distribute`; use a file system with POSIX ACLs, or with quotas, for hooks.advice_dir"
        yield Check(NAME, "warn", f"{format_count(len(sizes))} users own files that they can fill: {named}", todo)


def _check_waiting(app: App, root: Path) -> Iterator[Check]:
    """Warn if files of `almanac publish` wait for root's program."""
    from slurm_hooks.advice.folder import shown_path
    from telemetry.store.user_files import PUBLISHED

    written = [path.stat().st_mtime for path in (app.store_root / PUBLISHED).glob(f"*/user/{SITE}/advice")]
    placed = shown_path(root, SITE)
    since_s = app.now_s() - max(written, default=app.now_s())
    if written and since_s > _WAIT_S and (not placed.exists() or placed.stat().st_mtime < int(max(written))):
        todo = "add the task distribute for root, or run `almanac-distribute` as root after each `almanac publish`"
        said = f"advice of {format_duration(since_s)} ago waits to be distributed: users and Slurm have older files"
        yield Check(NAME, "warn", said, todo)


def _is_shown(root: Path, name: str, content: bytes) -> bool:
    """Return True if the user's copy seems to be that content, by its type and size."""
    from slurm_hooks.advice.folder import shown_path

    with contextlib.suppress(OSError):
        found = shown_path(root, name).lstat()
        return stat.S_ISREG(found.st_mode) and found.st_size == len(content)
    return False


def _check_entries(app: App, root: Path, are_shown: bool) -> Iterator[Check]:
    """Check every entry of sched/: its kind, and whether job_submit can use it."""
    from slurm_hooks.advice.file import FIRST_LINES, MAX_BYTES, is_of_future, parse
    from slurm_hooks.distribute import SCHED, SCHED_FILE_MODE

    files: list[AdviceFile] = []
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
            file = parse(content, None)
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
        yield Check(NAME, "warn", f"{_named(names)} {what}", todo)
    yield from _check_whole(app, files)


def _not_regular(path: Path, kind: int) -> Check:
    what = _KINDS.get(kind, "not a regular file")
    danger = ": slurmctld hangs when it opens this, until somebody writes to it" if kind == stat.S_IFIFO else ""
    return Check(NAME, "fail", f"{printable(str(path))} is {what}{danger}", f"remove it: rm -r {printable(str(path))}")


def _check_whole(app: App, known: Sequence[AdviceFile]) -> Iterator[Check]:
    if not known:
        yield Check(NAME, "warn", "no file is usable", "run `almanac publish` on a timer")
        return
    age_s = max(0, app.now_s() - max(file.written_s for file in known))
    is_late = age_s > LIFETIME_S / 2
    todo = "check the tasks publish and distribute with `almanac run --list`" if is_late else ""
    said = f"{format_count(len(known))} files, the newest written {format_duration(age_s)} ago"
    yield Check(NAME, "warn" if is_late else "ok", said, todo)
    modes, wanted = sorted({file.mode for file in known}), app.config.priority.mode
    if modes != [wanted]:
        yield Check(
            NAME,
            "warn",
            f"the files have mode {' and '.join(modes)}, the configuration has {wanted}",
            "run `almanac publish`, which says why",
        )


def _named(names: Sequence[str]) -> str:
    more = f" and {format_count(len(names) - _SHOWN)} more" if len(names) > _SHOWN else ""
    return f"{', '.join(printable(name, 40) for name in names[:_SHOWN])}{more}"
