"""Root's part of publishing: what a hostile account leaves for it, and what users find, as root with real uids."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from almanac.errors import ConfigError, StoreError
from slurm_hooks import distribute as module
from slurm_hooks import root_files
from slurm_hooks.distribute import LARGEST, Distributed, distribute
from slurm_hooks.root_files import Readers, acl_on

IS_ROOT = os.geteuid() == 0
ACCOUNT, ALICE, BOB, SLURM = (60_100, 60_001, 60_002, 60_064) if IS_ROOT else (os.geteuid(),) * 3 + (os.getegid(),)
REPORT = "7-1795256200-ab12"
only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")


class Site:
    """The account's folder with files for two users, and where root puts them; users can reach both."""

    def __init__(self, root: Path) -> None:
        self.store, self.source, self.target = root / "store", root / "store" / "published", root / "advice"
        self.give(f"{ALICE}/advice", b"advice of alice\n")
        self.give(f"{ALICE}/jobs", b"\x1f\x8b list")
        self.give(f"{ALICE}/reports/{REPORT}", b"\x1f\x8b report")
        if ALICE != BOB:
            self.give(f"{BOB}/advice", b"advice of bob\n")
        self.give("_site/advice", b"advice for all\n")

    def give(self, name: str, content: bytes = b"", make: Callable[[Path], object] | None = None) -> Path:
        """A file, or what `make` makes in its place, which is the account's."""
        path = self.source / "user" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            path.unlink()
        if make:
            make(path)
        else:
            path.write_bytes(content)
        for each in (path, *path.parents[: len(path.relative_to(self.store).parts)]):
            os.chown(each, ACCOUNT, -1, follow_symlinks=False)
        return path

    def run(self, sched_gid: int | None = SLURM) -> Distributed:
        return distribute(self.store, self.target, sched_gid, ("published",))

    def placed(self) -> dict[str, bytes]:
        found = (path for path in sorted(self.target.rglob("*")) if path.is_file() and path.name != ".lock")
        return {str(path.relative_to(self.target)): path.read_bytes() for path in found}


@pytest.fixture(params=["disk", "memory"])
def base(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder that users can reach, on each kind of file system that is here."""
    if request.param == "memory" and not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm here")
    root = Path(
        tempfile.mkdtemp(prefix="almanac-distribute-", dir="/dev/shm" if request.param == "memory" else "/var/tmp")
    )
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def as_user(uid: int, act: Callable[[], object]) -> str:
    """The name of what an act of that user raises, or "done"."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            act()
            os._exit(0)
        except PermissionError:
            os._exit(13)
        except BaseException:
            os._exit(99)
    return {0: "done", 13: "PermissionError"}.get(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), "failed")


def may_not(act: Callable[[], object], uid: int) -> None:
    assert as_user(uid, act) == "PermissionError"


# --- what users get


@only_root
def test_a_file_is_roots_and_one_user_reads_it(base: Path) -> None:
    site = Site(base)
    site.run()
    for name in ("advice", "jobs", f"reports/{REPORT}"):
        path = site.target / "user" / str(ALICE) / name
        about = path.stat()
        assert (about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)) == (0, 0, 0o440)
        assert as_user(ALICE, path.read_bytes) == "done"
        for uid in (BOB, ACCOUNT):
            may_not(path.read_bytes, uid)
        for act in (lambda path=path: path.write_bytes(b"x"), lambda path=path: path.chmod(0o600), path.unlink):
            may_not(act, ALICE)
    for folder in ("", "user", f"user/{ALICE}", f"user/{ALICE}/reports"):
        assert stat.S_IMODE((site.target / folder).stat().st_mode) == 0o711
        may_not(lambda folder=folder: (site.target / folder / "new").write_text(""), ALICE)
        may_not(lambda folder=folder: list((site.target / folder).iterdir()), ALICE)
    assert as_user(BOB, (site.target / "user/_site/advice").read_bytes) == "done"
    sched = (site.target / "sched" / str(ALICE)).stat()
    assert (sched.st_uid, sched.st_gid, stat.S_IMODE(sched.st_mode)) == (0, SLURM, 0o640)
    assert stat.S_IMODE((site.target / "sched").stat().st_mode) == 0o750


def test_what_changed_is_replaced_and_what_is_gone_goes(site: Site) -> None:
    first = site.run()
    assert (first.placed, first.removed, first.warnings()) == (6 + (ALICE != BOB) * 2, 0, [])
    again = site.run()
    assert (again.placed, again.removed, again.unchanged) == (0, 0, first.placed)
    site.give(f"{ALICE}/advice", b"newer advice\n")
    (site.source / "user" / str(ALICE) / "jobs").unlink()
    shutil.rmtree(site.source / "user" / str(ALICE) / "reports")
    done = site.run()
    assert (done.placed, done.removed) == (2, 2)
    assert {name for name in site.placed() if str(ALICE) in name} == {f"sched/{ALICE}", f"user/{ALICE}/advice"}
    assert site.placed()[f"sched/{ALICE}"] == site.placed()[f"user/{ALICE}/advice"] == b"newer advice\n"
    shutil.rmtree(site.source / "user" / str(ALICE))
    site.run()
    assert not [name for name in site.placed() if str(ALICE) in name]
    assert not (site.target / "user" / str(ALICE)).exists()


def test_copies_are_current_where_only_whole_seconds_are_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on ext4 with inodes of 128 bytes."""
    real = os.utime
    monkeypatch.setattr(module.os, "utime", lambda file, ns: real(file, ns=(ns[0] // 10**9 * 10**9,) * 2))
    path = site.give(f"{ALICE}/advice", b"advice one\n")
    real(path, ns=(1_795_256_200_500_000_000,) * 2)
    first = site.run()
    again = site.run()
    assert (again.placed, again.unchanged) == (0, first.placed)
    site.give(f"{ALICE}/advice", b"advice two\n")
    real(path, ns=(1_795_256_201_500_000_000,) * 2)
    assert site.run().placed == 2
    assert site.placed()[f"sched/{ALICE}"] == b"advice two\n"


def test_a_missing_source_removes_nothing(site: Site) -> None:
    site.run()
    before = site.placed()
    (site.source / "user").rename(site.source / "away")
    with pytest.raises(StoreError, match="cannot be opened: No such file"):
        site.run()
    assert site.placed() == before


def test_waits_before_the_first_publish_remove_nothing(site: Site) -> None:
    """As after an upgrade from a release that published elsewhere."""
    site.run()
    before = site.placed()
    shutil.rmtree(site.source / "user")
    site.give("_site/waits", b"waits\n")
    with pytest.raises(StoreError, match="has no _site/advice, nothing is distributed or removed") as caught:
        site.run()
    assert caught.value.hint == "run `almanac publish`"
    assert site.placed() == before
    site.give("_site/advice", b"newer advice for all\n")
    site.run()
    assert site.placed() == {"user/_site/advice": b"newer advice for all\n", "user/_site/waits": b"waits\n"} | {
        "sched/_site": b"newer advice for all\n"
    }


@only_root
def test_without_acl_a_group_of_one_user_reads_and_without_that_the_user_owns(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def setxattr(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    user, group = root_files.pwd.struct_passwd, root_files.grp.struct_group
    users = [
        user((name, "x", uid, gid, "", "/", "/bin/sh"))
        for name, uid, gid in (("alice", ALICE, 71_001), ("bob", BOB, 71_002), ("eve", 60_003, 71_002))
    ]
    groups = [group(("alice", "x", 71_001, ["alice"])), group(("bob", "x", 71_002, []))]
    monkeypatch.setattr("os.setxattr", setxattr)
    monkeypatch.setattr("pwd.getpwall", lambda: users)
    monkeypatch.setattr("grp.getgrall", lambda: groups)
    site.run()
    rights = {}
    for uid in (ALICE, BOB):
        about = (site.target / "user" / str(uid) / "advice").stat()
        rights[uid] = about.st_uid, about.st_gid, stat.S_IMODE(about.st_mode)
    assert rights == {ALICE: (0, 71_001, 0o440), BOB: (BOB, 0, 0o400)}, "eve's primary group is bob's too"
    groups[0] = group(("alice", "x", 71_001, ["alice", "unknown"]))
    assert site.run().placed == 3, "another member: alice's files are hers again"
    own = site.target / "user" / str(BOB) / "advice"
    own.chmod(0o600)
    with own.open("wb") as file:
        file.truncate(1 << 30)
    assert site.run().placed == 1, "owner and size are checked, and the file is reset"
    assert own.read_bytes() == b"advice of bob\n"
    monkeypatch.undo()
    assert site.run().placed == 4
    assert own.stat().st_uid == 0


@only_root
def test_an_acl_that_the_file_system_takes_and_does_not_keep_is_not_trusted(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.setxattr", lambda *_, **__: None)
    site.run()
    about = (site.target / "user" / str(ALICE) / "advice").stat()
    assert (about.st_uid, stat.S_IMODE(about.st_mode)) == (ALICE, 0o400)


@only_root
def test_other_rights_on_a_file_are_mended(site: Site) -> None:
    site.run()
    files = [site.target / "user" / str(ALICE) / name for name in ("advice", "jobs", f"reports/{REPORT}")]
    wanted = acl_on(str(files[0]))
    files[0].chmod(0o444)
    os.chown(files[1], ALICE, -1)
    os.removexattr(files[2], root_files.ACL)
    (site.target / "sched" / str(ALICE)).chmod(0o644)
    assert site.run().placed == 4
    assert {acl_on(str(path)) for path in files} == {wanted}
    os.setxattr(files[0], root_files.ACL, root_files.acl_for(BOB))
    assert site.run().placed == 1


@only_root
def test_what_users_own_in_their_folders_is_taken_over(site: Site) -> None:
    """Releases before 0.5 gave users their files, and earlier ones the folder."""
    folder = site.target / "user" / str(ALICE)
    (folder / "reports").mkdir(parents=True)
    (folder / "full" / "more").mkdir(parents=True)
    (folder / "advice").write_bytes(b"old")
    (folder / "link").symlink_to("/etc")
    (folder / "note").write_bytes(b"mine")
    (folder / "note").chmod(0o666)
    (folder / "reports" / REPORT).write_bytes(b"forged")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, ALICE, ALICE, follow_symlinks=False)
    for path in (site.target, site.target / "user"):
        path.chmod(0o711)
    bobs = site.target.parent / "of bob"
    bobs.write_text("bob's")
    os.chown(bobs, BOB, -1)
    os.link(bobs, folder / "second name")
    etc = Path("/etc").stat()
    held = os.open(folder / "full", os.O_RDONLY)
    done = site.run()
    assert "taken from a user who kept it in their folder (5)" in "".join(done.warnings())
    for path in (folder, folder / "advice", folder / "reports", folder / "reports" / REPORT, folder / "note"):
        assert path.lstat().st_uid == 0, path
    assert stat.S_IMODE((folder / "note").stat().st_mode) == 0o400
    assert bobs.stat().st_uid == BOB, "a second name of another user's file only goes"
    assert not {"link", "second name"} & {path.name for path in folder.iterdir()}
    assert (folder / "reports" / REPORT).read_bytes() == b"\x1f\x8b report"
    may_not(lambda: os.open("more", os.O_CREAT | os.O_WRONLY, dir_fd=held), ALICE)
    os.close(held)
    assert (Path("/etc").stat().st_uid, Path("/etc").stat().st_mode) == (etc.st_uid, etc.st_mode)
    assert site.run().warnings() == []


@only_root
def test_a_mount_in_a_users_folder_leaves_none_of_the_other_entries_theirs(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real = site.target / "user" / str(ALICE), os.stat
    site.run()
    for name in "abcdef":
        (folder / name).write_bytes(b"x")
        os.chown(folder / name, ALICE, -1)
    mounted = next(path.name for path in folder.iterdir() if len(path.name) == 1)  # in the order of the run

    def stat_of(name: object, *args: object, **named: object) -> os.stat_result:
        if name == mounted:
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return real(name, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(module.os, "stat", stat_of)
    warnings = "".join(site.run().warnings())
    monkeypatch.undo()
    assert "taken from a user who kept it in their folder (5)" in warnings
    assert f"is something mounted there? (1): '{ALICE}/{mounted}'" in warnings
    assert {path.name for path in folder.iterdir() if path.stat().st_uid == ALICE} == {mounted}


@only_root
def test_what_cannot_be_given_to_its_user_still_reaches_slurm(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ACLs the file is the user's, and their quota may be used up."""
    real = os.fchown

    def full(handle: int, uid: int, gid: int) -> None:
        if uid == ALICE:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        real(handle, uid, gid)

    monkeypatch.setattr(Readers, "has_acl", False)
    monkeypatch.setattr(module.os, "fchown", full)
    (warning,) = site.run().warnings()
    assert "cannot be given to its reader (3)" in warning and f"'user/{ALICE}/advice'" in warning
    assert site.placed()[f"sched/{ALICE}"] == b"advice of alice\n"
    assert f"user/{ALICE}/advice" not in site.placed()


@only_root
def test_folders_of_two_owners_are_not_trusted(site: Site) -> None:
    os.chown(site.source, BOB, -1)
    with pytest.raises(StoreError, match="published does not belong to the owner"):
        site.run()


# --- what a hostile account can leave


PLANTS: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a link to root's file": lambda path: path.symlink_to("/etc/shadow"),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": lambda path: path.mkdir(),
    "a socket": lambda path: _bind(path),
    "a sparse giant": lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
    "one byte too many": lambda path: path.write_bytes(b"x" * ((16 << 20) + 1)),
}


def _bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.open(path.parent, os.O_RDONLY)
        bound.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", ["advice", "jobs", f"reports/{REPORT}"])
def test_what_is_no_plain_file_is_not_read_and_keeps_nobody_from_theirs(site: Site, plant: str, name: str) -> None:
    site.run()
    site.give(f"{ALICE}/{name}", make=PLANTS[plant])
    site.give("_site/advice", b"newer advice for all\n")
    done = site.run()
    assert len(done.warnings()) == 1 and f"{ALICE}/{name}" in done.warnings()[0]
    assert f"user/{ALICE}/{name}" not in site.placed(), "a refused file is as one that is gone"
    assert site.placed()["user/_site/advice"] == b"newer advice for all\n"


@only_root
def test_roots_files_and_second_names_are_not_copied(site: Site, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    advice = site.source / "user" / str(ALICE) / "advice"
    advice.unlink()
    os.link(secret, advice)
    assert "a plain file under one name" in site.run().warnings()[0]
    secret.unlink()
    assert "another owner" in site.run().warnings()[0], "root's own file, moved there"
    assert not [content for content in site.placed().values() if b"secret" in content]


@pytest.mark.parametrize("place", ["", "user", f"user/{ALICE}", f"user/{ALICE}/reports"])
def test_no_link_is_followed_to_another_folder(site: Site, tmp_path: Path, place: str) -> None:
    path, elsewhere = site.source / place, tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    if place in ("", "user"):
        with pytest.raises(StoreError):
            site.run()
        assert site.placed() == {}
    else:
        assert site.run().warnings()
        assert f"user/{ALICE}/reports/{REPORT}" not in site.placed()
        assert "user/_site/advice" in site.placed()


@pytest.mark.parametrize(
    "name",
    ["a\nb", "..x", "01", "4294967295", "-1", "1e3", "١", "_site2", ".tmp-1", "1 ", "\udce4", "99999999999", "x" * 255],
)
def test_strange_names_of_users_are_not_looked_at(site: Site, name: str) -> None:
    site.run()
    before = site.placed()
    (site.source / "user" / name).mkdir()
    (site.source / "user" / name / "advice").write_bytes(b"x")
    os.mkfifo(site.source / "user" / "_site" / name)
    assert site.run().warnings() == []
    assert site.placed() == before


@pytest.mark.parametrize("content", [b"\xff\xfe", b"cut \xe2\x82", b"\xed\xa0\x80"])
def test_text_must_be_utf8(site: Site, content: bytes) -> None:
    site.give(f"{ALICE}/advice", content)
    assert "not UTF-8" in site.run().warnings()[0]
    assert f"sched/{ALICE}" not in site.placed()


def test_a_file_swapped_or_grown_while_it_is_read_is_checked_as_it_is_opened(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look and the opening: a link, a FIFO, and 1 TiB."""
    path, real = site.source / "user" / str(ALICE) / "advice", os.open
    for plant in ("a link to root's file", "a FIFO", "a sparse giant"):
        shutil.rmtree(site.target, ignore_errors=True)
        site.give(f"{ALICE}/advice", b"words\n")

        def swapped(name: str, *args: int, plant: str = plant, **named: int) -> int:
            if name == "advice" and path.lstat().st_size == 6:
                site.give(f"{ALICE}/advice", make=PLANTS[plant])
            return real(name, *args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "open", swapped)
            done = site.run()
        assert len(done.warnings()) == 1
        assert f"sched/{ALICE}" not in site.placed()


def test_a_million_names_end_at_a_bound_and_copies_do_not_add_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 entries of which 5 are read, other ones each time: no more than 5 folders are ever there."""
    monkeypatch.setattr(module, "MOST_USERS", 5)
    for turn in range(4):
        shutil.rmtree(site.source / "user")
        for uid in range(20):
            site.give(f"{70_000 + 100 * turn + uid}/advice", b"x\n")
        site.give("_site/advice", b"x\n")
        done = site.run()
        assert "more entries in a folder than are read" in done.warnings()[0]
        assert len([name for name in site.placed() if name.startswith("user/")]) == 5


def test_all_bytes_together_have_a_bound(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    for number in range(20):
        site.give(f"{ALICE}/reports/{number}-1-a", b"x" * 20)
    done = site.run()
    assert "more than root copies" in "".join(done.warnings())
    assert sum(map(len, site.placed().values())) <= 100
    assert f"user/{ALICE}/advice" in site.placed(), "the small files of everybody come first"


def test_entries_of_all_folders_together_have_a_bound(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 12)
    for number in range(200):
        site.give(f"{ALICE}/reports/{number}-1-a", make=os.mkfifo)
    done = site.run()
    assert sum(many for many, _ in done.left_out.values()) < 20
    assert f"user/{ALICE}/advice" in site.placed()


@pytest.mark.parametrize(("size_mib", "free_mib"), [(1000, 19), (10_000_000, 1023)])
def test_a_disk_that_is_nearly_full_takes_no_more(
    site: Site, monkeypatch: pytest.MonkeyPatch, size_mib: int, free_mib: int
) -> None:
    site.run()
    before = site.placed()
    site.give(f"{ALICE}/advice", b"newer\n")
    space = SimpleNamespace(f_frsize=1 << 20, f_blocks=size_mib, f_bavail=free_mib)
    monkeypatch.setattr(module.os, "fstatvfs", lambda _: space)
    with pytest.raises(StoreError, match="is free; the old files are still in place") as caught:
        site.run()
    assert "make room" in caught.value.hint
    assert site.placed() == before
    space.f_bavail += 2
    assert site.run().placed == 2


@pytest.mark.parametrize("call", ["rename", "fchmod", "utime", "fchown", "mkdir"])
def test_killed_at_any_moment_each_file_is_the_old_one_or_the_new_one(site: Site, call: str) -> None:
    site.run()
    before = site.placed()
    for name in ("_site", str(ALICE)):
        site.give(f"{name}/advice", b"new\n")
    for after in range(6):
        child = os.fork()
        if child == 0:
            _die_at(call, after)
            site.run()
            os._exit(0)
        os.waitpid(child, 0)
        for name, content in site.placed().items():
            assert ".tmp-" in name or content in (before[name], b"new\n"), name
    site.run()
    assert not list(site.target.rglob(".tmp-*"))
    assert site.placed()[f"sched/{ALICE}"] == b"new\n"


def _die_at(call: str, after: int) -> None:
    count, real = [0], getattr(os, call)

    def counted(*args: object, **named: object) -> object:
        count[0] += 1
        if count[0] > after:
            os.kill(os.getpid(), 9)
        return real(*args, **named)

    setattr(os, call, counted)


@pytest.mark.parametrize("where", ["", "user", "sched", ".."])
def test_nothing_is_placed_where_others_can_write(site: Site, where: str) -> None:
    site.run()
    (site.target / where).resolve().chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to it"):
        site.run()


@only_root
def test_another_file_system_on_one_users_folder_keeps_no_other_user_from_their_file(site: Site) -> None:
    site.run()
    folder = site.target / "user" / str(ALICE)
    mount = ["mount", "-t", "tmpfs", "-o", f"size=64k,uid={ALICE},mode=700", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no file system may be mounted here")
    try:
        site.give(f"{ALICE}/advice", b"newer\n")
        site.give(f"{BOB}/advice", b"newer\n")
        done = site.run()
        assert "cannot be put in its place" in "".join(done.warnings())
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    assert site.placed()[f"user/{BOB}/advice"] == b"newer\n"


# --- mail


@only_root
def test_mail_choices_are_tidied_where_their_service_is(site: Site) -> None:
    junk = site.target / "mail" / "junk"
    site.run()
    junk.parent.mkdir()
    junk.write_text("x")
    os.chown(junk, ALICE, -1)
    assert (site.run(None).warnings(), junk.exists()) == ([], True)
    assert site.run().warnings() == [f"removed from the folder mail, no choice, by uid (1): '{ALICE}'"]
    assert not junk.exists()


# --- the program


def test_the_program_loads_no_library_and_places_files(site: Site) -> None:
    code = (
        "import sys; from cli.distribute import main\n"
        "try: main()\n"
        "finally: print(*sorted({name.partition('.')[0] for name in sys.modules} & {'click', 'numpy', 'pandas',"
        " 'pyarrow', 'duckdb', 'lightgbm', 'rich', 'requests'}))"
    )
    options = ["--from", str(site.source), "--to", str(site.target), "--no-sched"]
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *options], capture_output=True, text=True, check=True, timeout=300
    )
    assert (done.stdout.split("\n")[1:], done.stderr) == (["", ""], "")
    assert f"user/{ALICE}/advice" in site.placed()
    assert not (site.target / "sched").exists()


@only_root
def test_rights_of_everybodys_and_of_roots_files(tmp_path: Path) -> None:
    handle = os.open(tmp_path, os.O_RDONLY)
    readers = Readers(handle)
    assert [(each.uid, each.mode, each.acl) for each in (readers("_site"), readers("0"))] == [
        (0, 0o444, None), (0, 0o400, None)
    ]  # fmt: skip
    assert not list(tmp_path.iterdir())
    os.close(handle)
    assert max(LARGEST.values()) < 1 << 25
