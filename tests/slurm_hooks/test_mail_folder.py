"""The folder of mail choices, with what a user has mounted on their own."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from almanac.atomic import opened
from slurm_hooks import root_files
from slurm_hooks.root_files import tidy_choices


class _Mounted:
    """An entry of a folder with somebody's dead FUSE file system on it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stat(self, follow_symlinks: bool = True) -> os.stat_result:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", self.name)


only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def tidied(root: Path) -> list[tuple[str, str]]:
    noted = list[tuple[str, str]]()
    with opened(root) as target:
        tidy_choices(target, lambda reason, name: noted.append((reason, name)))
    return noted


@only_root
def test_a_mount_on_ones_own_choice_is_named_and_the_rest_is_tidied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mail").mkdir()
    for name in ("60002", "junk", "more"):
        (tmp_path / "mail" / name).write_bytes(b"off\n")
        os.chown(tmp_path / "mail" / name, 60_003, -1)
    real, noted = os.scandir, list[tuple[str, str]]()

    @contextlib.contextmanager
    def scandir(folder: int) -> Iterator[Iterator[object]]:
        with real(folder) as entries:
            yield (_Mounted(each.name) if each.name == "60002" else each for each in entries)

    with monkeypatch.context() as patch, opened(tmp_path) as target:
        patch.setattr(os, "scandir", scandir)
        tidy_choices(target, lambda reason, name: noted.append((reason, name)))
    assert [path.name for path in (tmp_path / "mail").iterdir()] == ["60002"]
    assert sorted(noted) == [
        ("cannot be looked at in the folder mail, is something mounted there?", "60002"),
        *[("removed from the folder mail, no choice, by uid", "60003")] * 2,
    ]


@only_root
def test_only_choices_stay_in_the_folder_where_everybody_can_make_files(tmp_path: Path) -> None:
    mail = tmp_path / "mail"
    mail.mkdir()
    for name in ("60001", "60001.1", ".tmp-1", ".tmp-2", "60008", *(f"junk\n{number}" for number in range(50))):
        (mail / name).write_text("off\n")
    with (mail / "60001.2").open("wb") as file:
        file.truncate(1 << 30)
    (mail / "empty").mkdir()
    (mail / "full" / "inner").mkdir(parents=True)
    (mail / "60002" / "inner").mkdir(parents=True)
    os.mkfifo(mail / "60001.3")
    (mail / "60001.4").symlink_to("/etc/shadow")
    for path in mail.rglob("*"):
        os.chown(path, 60_001, -1, follow_symlinks=False)
    (mail / "last-read").write_text("1795256200 ctl\n")
    os.chown(mail / "last-read", 60_100, -1)
    assert set(tidied(tmp_path)) == {("removed from the folder mail, no choice, by uid", "60001")}
    left = {path.name for path in mail.iterdir()}
    assert left - {".tmp-1", ".tmp-2"} == {"60001", "60001.1", "last-read"}
    assert len(left) == 4, "one file that is being written"
    assert tidied(tmp_path) == []


def plant(folder: Path, inner: str = "a/b") -> None:
    (folder / inner).mkdir(parents=True)
    for path in (folder, *folder.rglob("*")):
        (path / "big").write_bytes(b"x" * 9000)
        (path / "link").symlink_to("/etc")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 60_002, -1, follow_symlinks=False)


@only_root
def test_a_full_folder_goes_and_its_owner_can_add_nothing_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mail = tmp_path / "mail"
    mail.mkdir()
    plant(mail / "60001")
    plant(mail / "last-read", "/".join("d" * 300))
    (mail / "60003").mkdir()  # of root's, as releases before left it
    (mail / "60003" / "big").write_bytes(b"x")
    (mail / "lost+found").mkdir()
    monkeypatch.setattr(root_files, "MOST_BELOW", 4)
    assert tidied(tmp_path) == [("removed from the folder mail, no choice, by uid", "60002")] * 2
    left = [path for path in mail.iterdir() if path.name not in ("lost+found", "60003")]
    assert left and all(path.name.startswith(".tmp-") for path in left), "the names are free at once"
    assert {(path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) for path in left} == {(0, 0o700)}
    monkeypatch.undo()
    assert tidied(tmp_path) == []
    assert [path.name for path in mail.iterdir()] == ["lost+found"]
    assert Path("/etc/passwd").exists()


@only_root
def test_a_mount_in_a_folder_keeps_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mail, real = tmp_path / "mail", os.rename
    mail.mkdir()
    plant(mail / "60001")

    def rename(name: str, *args: object, **named: object) -> None:
        if name == "a":
            raise OSError(errno.EBUSY, "Device or resource busy")
        real(name, *args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "rename", rename)
    tidied(tmp_path)
    (taken,) = mail.iterdir()
    assert [path.name for path in taken.iterdir()] == ["a"]
    monkeypatch.undo()
    tidied(tmp_path)
    assert not list(mail.iterdir())
