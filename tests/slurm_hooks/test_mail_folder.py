"""The folder of mail choices, with what a user has mounted on their own."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_hooks.mail_folder import tidy_choices
from telemetry.store.atomic import opened


class _Mounted:
    """An entry of a folder with somebody's dead FUSE file system on it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def stat(self, follow_symlinks: bool = True) -> os.stat_result:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected", self.name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
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
