"""Root's part of publishing: copies whole files that almanac's account made to where users and Slurm read them.

    <source>/user/<uid>/<name>  of the account, which may be hostile: nothing here knows the format of a file
    <target>/user/<uid>/<name>  of root: one user can read it (`_site`: everybody), and nobody else can write to it
    <target>/sched/<uid>        of root and SlurmUser's group: the bytes of `advice` again, which job_submit believes
    <target>/mail/<uid>         of users: their choices of mail; other entries are removed

A file is copied if it differs from its copy in size or time, or if the copy has other rights. It is removed when it is
gone from the source. Read are only plain files of the source's owner, under fixed names, once each, up to a size.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from almanac.atomic import TEMPORARY, make_folders, opened
from almanac.errors import ConfigError, StoreError
from almanac.published.files import REPORTS
from almanac.published.outgoing import explained, writable_by_others
from almanac.submit_config import SITE
from slurm_hooks.root_files import (
    LeftOutError,
    Readers,
    Rights,
    acl_on,
    check,
    first_names,
    opened_below,
    read,
    tidy_choices,
    within,
)

USER, SCHED, ADVICE = "user", "sched", "advice"
TEXT_BYTES, PACKED_BYTES = 65_536, 16 << 20
LARGEST = {
    ADVICE: TEXT_BYTES, "advice.json": 4 * TEXT_BYTES, "times": TEXT_BYTES, "packing": TEXT_BYTES, "waits": TEXT_BYTES,
    "live": 4 * TEXT_BYTES, "jobs": PACKED_BYTES,
}  # fmt: skip
"""Bytes of each file but those of `reports`. Files of PACKED_BYTES are packed, to be shown only; others are UTF-8."""
MOST_USERS, MOST_REPORTS, MOST_FILES, MOST_BYTES = 100_000, 10_000, 2_000_000, 32 << 30
"""Users, reports of one of them, and all files and their bytes: the most that the account can make root write."""
NAMED = 5
FREE_FRAC, FREE_BYTES = 0.02, 1 << 30
"""Space of the target's file system that stays free: the smaller of the two."""
NS = 10**9
BATCH_FILES, BATCH_BYTES = 500, 64 << 20
MODE, SCHED_MODE, SCHED_FILE_MODE = 0o711, 0o750, 0o640
_UID, _REPORT = re.compile(r"0|[1-9][0-9]{0,9}"), re.compile(r"[0-9]{1,19}-[0-9]{1,19}-[0-9a-f]{1,16}")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
Folder = tuple[str, ...]
"""A folder below the target."""


@dataclass
class Distributed:
    """The outcome of a run. left_out: by reason how many, and the names of some."""

    placed: int = 0
    unchanged: int = 0
    removed: int = 0
    left_out: dict[str, tuple[int, tuple[str, ...]]] = field(default_factory=dict)

    def leave_out(self, reason: str, name: str) -> None:
        count, names = self.left_out.get(reason, (0, ()))
        self.left_out[reason] = count + 1, names if name in names or len(names) == NAMED else (*names, name)

    def warnings(self) -> list[str]:
        return [f"{why} ({many}): {', '.join(map(ascii, names))}" for why, (many, names) in self.left_out.items()]


def distribute(source: Path, target: Path, sched_gid: int | None, below: Sequence[str] = ()) -> Distributed:
    """Copy what is due, remove what is gone, and tidy the choices of mail.

    sched_gid: None on a host that has neither sched/ nor the service that reads the choices. below: names of folders
    from source to the one with the files. All of them belong to source's owner, who may have made links of them.

    Raises ConfigError if others can write to the target, StoreError before the first `almanac publish`, or if the
    target takes no more: each file is the old one or the new one then.
    """
    if faults := writable_by_others(target, os.geteuid()):
        todo = "who can write there can stop slurmctld: correct owner and mode, or choose another hooks.advice_dir"
        raise ConfigError(f"nothing is published: {'; '.join(faults)}", todo)
    with explained(target, target):
        make_folders(target, MODE)
        target.chmod(MODE)
    with (
        opened_below(source, (*below, USER)) as folder,
        explained(target, target),
        opened(target) as handle,
        _locked(handle),
    ):
        run = _Distribution(handle, sched_gid)
        run.prepare()
        if sched_gid is not None:
            tidy_choices(handle, run.done.leave_out)
        _require_advice(folder, source)
        run.distribute(folder)
        return run.done


def _require_advice(folder: int, source: Path) -> None:
    """Raise StoreError before the first `almanac publish`: the folder of `almanac waits` alone is not all there is."""
    try:
        with opened(SITE, folder) as site:
            os.stat(ADVICE, dir_fd=site, follow_symlinks=False)
    except OSError as error:
        said = f"{source}: has no {SITE}/{ADVICE}, nothing is distributed or removed: {error.strerror}"
        raise StoreError(said, "run `almanac publish`") from error


@contextlib.contextmanager
def _locked(folder: int) -> Iterator[None]:
    """Wait for the one run at a time."""
    with open(os.open(".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)) as lock:  # noqa: PTH123 - of a descriptor
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _is_folder_name(name: str) -> bool:
    return name == SITE or bool(_UID.fullmatch(name) and int(name) < 2**32 - 1)


@dataclass(frozen=True)
class _Place:
    """The place of a file, and its rights."""

    folder: Folder
    name: str
    rights: Rights

    @property
    def path(self) -> str:
        return "/".join((*self.folder, self.name))


class _Distribution:
    """One run. target: a descriptor."""

    def __init__(self, target: int, sched_gid: int | None) -> None:
        self.target, self.sched_gid, self.done = target, sched_gid, Distributed()
        self.readers, self.me = Readers(target), os.geteuid()
        self.staged: list[tuple[str, _Place]] = []
        self.entries = self.size = self.batch_bytes = 0
        self._last, self._place, self._handle = contextlib.ExitStack(), Folder(), -1

    def prepare(self) -> None:
        """Make the folders, and remove what a killed run or an older release left."""
        for name in os.listdir(self.target):  # noqa: PTH208 - of a descriptor
            if name.startswith(TEMPORARY) or name in (".reports.json", ".waits.lock"):
                os.unlink(name, dir_fd=self.target)
        with self._open((USER,), is_made=True):
            pass
        if self.sched_gid is not None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(SCHED, SCHED_MODE, dir_fd=self.target)
            with opened(SCHED, self.target) as sched:
                os.fchown(sched, self.me, self.sched_gid)
                os.fchmod(sched, SCHED_MODE)

    def distribute(self, source: int) -> None:
        """Copy what is due, and remove what else was published. source: a descriptor of the users' folders."""
        for name in filter(_is_folder_name, self._names((USER,))):
            self._seize(name)
        owner, served = os.fstat(source).st_uid, set[str]()
        users = self._listed(source, MOST_USERS, _is_folder_name)
        try:
            for step in (self._copy_files, self._copy_reports):  # the small files of everybody first
                for user in users:
                    with self._noting(user), within(user, source) as folder:
                        step(user, folder, owner)
                        served.add(user)
            self._put()
        finally:
            self._last.close()
            for temporary, _ in self.staged:
                os.unlink(temporary, dir_fd=self.target)
        for gone in filter(_is_folder_name, {*self._names((USER,))} - served):
            self._clear((USER, gone, REPORTS))
            self._clear((USER, gone))
        for gone in {*self._names((SCHED,))} - served if self.sched_gid is not None else ():
            self._remove((SCHED,), gone)

    def _listed(self, folder: int, most: int, is_known: Callable[[str], object]) -> list[str]:
        """Known names among the first entries of a folder of the source."""
        most = max(0, min(most, MOST_FILES - self.entries))
        names = first_names(folder, most)
        self.entries += len(names)
        if len(names) > most:
            self.done.leave_out("left out, more entries in a folder than are read", "")
        return list(filter(is_known, names[:most]))

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except LeftOutError as error:
            self.done.leave_out(str(error), name)

    def _copy_files(self, user: str, folder: int, owner: int) -> None:
        rights = self.readers(user)
        for name, most in LARGEST.items():
            places = [_Place((USER, user), name, rights)]
            if name == ADVICE and self.sched_gid is not None:
                places.append(_Place((SCHED,), user, Rights(self.me, self.sched_gid, SCHED_FILE_MODE)))
            with self._noting(f"{user}/{name}"):
                self._copy(folder, name, owner, most, places)

    def _copy_reports(self, user: str, folder: int, owner: int) -> None:
        place, rights, names = (USER, user, REPORTS), self.readers(user), list[str]()
        if self._listed(folder, MOST_REPORTS, REPORTS.__eq__):
            with self._noting(f"{user}/{REPORTS}"), within(REPORTS, folder) as reports:
                names = self._listed(reports, MOST_REPORTS, _REPORT.fullmatch)
                for name in names:
                    with self._noting(f"{user}/{REPORTS}/{name}"):
                        self._copy(reports, name, owner, PACKED_BYTES, [_Place(place, name, rights)])
        for name in {*self._names(place)} - {*names}:
            self._remove(place, name)
        if not names:
            self._clear(place)

    def _copy(self, folder: int, name: str, owner: int, most: int, places: Sequence[_Place]) -> None:
        """Stage a file for the places that lack it. Raises LeftOutError, after its copies are removed.

        Copies of a refused file do not stay: refused names would not count, and copies of them could fill the disk.
        """
        try:
            about = os.stat(name, dir_fd=folder, follow_symlinks=False)
            check(about, owner, most)
            due = [place for place in places if not self._is_current(place, about)]
            content, written_ns = read(folder, name, owner, most, most < PACKED_BYTES) if due else (b"", 0)
            self.size += len(places) * max(about.st_size, len(content))
            if self.size > MOST_BYTES:
                raise LeftOutError("left out, more than root copies")
        except (FileNotFoundError, LeftOutError) as error:
            for place in places:
                self._remove(place.folder, place.name)
            if isinstance(error, LeftOutError):
                raise
            return
        self.done.unchanged += len(places) - len(due)
        for place in due:
            self._stage(content, written_ns, place)

    def _is_current(self, place: _Place, about: os.stat_result) -> bool:
        with contextlib.suppress(OSError):
            folder = self._kept_open(place.folder)
            found = os.stat(place.name, dir_fd=folder, follow_symlinks=False)
            if not stat.S_ISREG(found.st_mode):
                return False
            times = about.st_mtime_ns, about.st_mtime_ns // NS * NS  # some kinds keep whole seconds only
            is_same = found.st_size == about.st_size and found.st_mtime_ns in times
            return is_same and place.rights.are_on(found, acl_on(f"/proc/self/fd/{folder}/{place.name}"))
        return False

    def _stage(self, content: bytes, written_ns: int, place: _Place) -> None:
        space = os.fstatvfs(self.target)
        left = space.f_bavail * space.f_frsize - len(content)
        if space.f_blocks and left < min(FREE_FRAC * space.f_blocks * space.f_frsize, FREE_BYTES):  # 0: no size told
            raise OSError(28, f"less than {FREE_FRAC:.0%} of the file system and less than 1 GiB is free")
        temporary = f"{TEMPORARY}{secrets.token_hex(8)}"
        with open(os.open(temporary, _NEW, 0o600, dir_fd=self.target), "wb", 0) as out:  # noqa: PTH123 - of a descriptor
            self.staged.append((temporary, place))
            if out.write(content) != len(content):
                raise OSError(28, "No space left on device")
            os.utime(out.fileno(), ns=(written_ns, written_ns))
            try:
                place.rights.apply(out.fileno())
            except OSError:  # a quota of the reader's: other places of the same file get theirs
                os.unlink(self.staged.pop()[0], dir_fd=self.target)
                self.done.leave_out("left out, cannot be given to its reader", place.path)
                return
        self.batch_bytes += len(content)
        if len(self.staged) >= BATCH_FILES or self.batch_bytes >= BATCH_BYTES:
            self._put()

    def _put(self) -> None:
        """Bring the staged files to disk, with one wait for many, and put each in its place."""
        if self.staged and ctypes.CDLL(None, use_errno=True).syncfs(self.target):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        while self.staged:
            temporary, place = self.staged[-1]
            try:
                with self._open(place.folder, is_made=True) as folder:
                    os.rename(temporary, place.name, src_dir_fd=self.target, dst_dir_fd=folder)
                self.done.placed += 1
            except OSError:
                os.unlink(temporary, dir_fd=self.target)
                self.done.leave_out("left out, cannot be put in its place", place.path)
            self.staged.pop()
        self.batch_bytes = 0

    def _kept_open(self, place: Folder) -> int:
        """A descriptor that stays open until another folder is asked for. Raises OSError."""
        if place != self._place:
            self._last.close()
            self._place = ()
            handle = self._last.enter_context(self._open(place))
            self._place, self._handle = place, handle
        return self._handle

    @contextlib.contextmanager
    def _open(self, place: Folder, is_made: bool = False) -> Iterator[int]:
        """A descriptor of a folder of the target. is_made: make it if it is not there. Raises OSError."""
        with contextlib.ExitStack() as stack:
            handle = self.target
            for name in place:
                if is_made and place[0] == USER:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=handle)
                handle = stack.enter_context(opened(name, handle))
                if is_made and place[0] == USER:
                    self._own(handle, MODE)
            yield handle

    def _own(self, handle: int, mode: int) -> None:
        about = os.fstat(handle)
        if (about.st_uid, stat.S_IMODE(about.st_mode)) != (self.me, mode):
            os.fchown(handle, self.me, -1)
            os.fchmod(handle, mode)

    def _seize(self, user: str) -> None:
        """Take over a user's folder and what they keep there, from when it was theirs: it could fill the disk."""
        with contextlib.suppress(OSError), self._open((USER, user)) as folder:
            self._own(folder, MODE)
            for name in os.listdir(folder):  # noqa: PTH208 - of a descriptor
                try:
                    if self._take(folder, name):
                        self.done.leave_out("taken from a user who kept it in their folder", f"{user}/{name}")
                except OSError:
                    self.done.leave_out("cannot be taken from a user, is something mounted there?", f"{user}/{name}")

    def _take(self, folder: int, name: str) -> bool:
        """Return False for what users may have there. Raises OSError."""
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if about.st_uid == self.me or (name in LARGEST and not stat.S_ISDIR(about.st_mode)):
            return False
        if stat.S_ISDIR(about.st_mode):
            kept = f"{name}-{secrets.token_hex(8)}"
            os.rename(name, kept, src_dir_fd=folder, dst_dir_fd=folder)
            with opened(kept, folder) as handle:
                self._own(handle, 0o700)
        elif stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
            os.chown(name, self.me, -1, dir_fd=folder, follow_symlinks=False)
            os.chmod(name, 0o400, dir_fd=folder)
        else:  # a second name may be one of another user's file
            os.unlink(name, dir_fd=folder)
        return True

    def _names(self, place: Folder) -> list[str]:
        with contextlib.suppress(OSError), self._open(place) as folder:
            return os.listdir(folder)  # noqa: PTH208 - of a descriptor
        return []

    def _remove(self, place: Folder, name: str) -> None:
        with contextlib.suppress(OSError), self._open(place) as folder:
            os.unlink(name, dir_fd=folder)
            self.done.removed += 1

    def _clear(self, place: Folder) -> None:
        """Remove what was published to a folder, and the folder if nothing else is in it."""
        for name in self._names(place):
            if name in LARGEST or _REPORT.fullmatch(name):
                self._remove(place, name)
        with contextlib.suppress(OSError), self._open(place[:-1]) as above:
            os.rmdir(place[-1], dir_fd=above)
