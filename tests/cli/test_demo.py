"""`almanac demo` and what was in its folder before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from almanac.errors import StoreError
from cli.demo import _prepare

if TYPE_CHECKING:
    from command_line import CommandLine


def test_a_sites_own_configuration_and_store_are_left_alone(site: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("{}")
    (tmp_path / "almanac.toml").write_text('[site]\ncluster = "perlmutter"\n')
    done = site.raw("demo", "--dir", str(tmp_path))
    assert done.returncode == 4
    assert "no demo" in done.stderr
    assert "perlmutter" in (tmp_path / "almanac.toml").read_text()
    assert (tmp_path / "store" / "store.json").exists()


def test_an_earlier_demo_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    _prepare(tmp_path / "demo")
    (tmp_path / "demo" / "store").mkdir()
    _prepare(tmp_path / "demo")
    assert not (tmp_path / "demo" / "store").exists()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match="no demo"):
        _prepare(tmp_path)


def test_a_folder_that_others_can_write_to_is_no_place_for_a_demo(tmp_path: Path) -> None:
    """/tmp/almanac-demo, made by somebody who waits for root's demo, to put links into it."""
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo").chmod(0o777)
    with pytest.raises(StoreError, match="others can write to it"):
        _prepare(tmp_path / "demo")
    (tmp_path / "demo").chmod(0o755)
    if os.getuid() == 0:
        os.chown(tmp_path / "demo", 60001, 60001)
        with pytest.raises(StoreError, match="belongs to another user"):
            _prepare(tmp_path / "demo")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's link")
def test_another_users_link_does_not_choose_where_a_demo_writes(tmp_path: Path) -> None:
    """Root's demo in /tmp, where fs.protected_symlinks is 0."""
    (tmp_path / "private").mkdir()
    (tmp_path / "demo").symlink_to(tmp_path / "private")
    os.lchown(tmp_path / "demo", 60001, 60001)
    with pytest.raises(StoreError, match="belongs to another user"):
        _prepare(tmp_path / "demo")
    assert not list((tmp_path / "private").iterdir())
