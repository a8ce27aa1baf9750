"""Owner and mode of what steers almanac: root refuses what others can change, through folders and links as well."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from almanac import trusted_file
from almanac.config_file import load_config
from almanac.errors import ConfigError
from almanac.trusted_file import read_trusted, require_trusted, trust_fault

NOBODY = pwd.getpwnam("nobody").pw_uid
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def slurm_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The slurm.conf of this host; there is none at first."""
    path = tmp_path / "slurm.conf"
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(trusted_file, "SLURM_CONFS", (str(path),))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "etc").mkdir(mode=0o755)
    (tmp_path / "etc" / "almanac.toml").write_text('[site]\ncluster = "c"\n')
    return tmp_path / "etc"


def spoil(folder: Path, how: str) -> None:
    file = folder / "almanac.toml"
    if how == "mode 0666":
        file.chmod(0o666)
    elif how == "mode 0664":
        file.chmod(0o664)
    elif how == "owner":
        os.chown(file, NOBODY, -1)
    elif how == "folder's mode":
        folder.chmod(0o777)
    elif how == "folder's group":
        folder.chmod(0o775)
    elif how == "folder's owner":
        os.chown(folder, NOBODY, -1)
    elif how == "link's owner":
        file.rename(folder / "real")
        file.symlink_to("real")
        os.lchown(file, NOBODY, -1)
    elif how == "link into a folder of others":
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        file.rename(folder / "open" / "real")
        file.symlink_to("open/real")
    elif how == "link over a folder of others":
        (folder / "open").mkdir()
        (folder / "open").chmod(0o777)
        (folder / "open" / "back").symlink_to(folder)
        file.rename(folder / "real")
        file.symlink_to("open/back/real")
    elif how == "link to a link":
        file.rename(folder / "real")
        (folder / "real").chmod(0o622)
        (folder / "next").symlink_to(folder / "real")
        file.symlink_to("../etc/next")


HOW = [
    "mode 0666", "mode 0664", "owner", "folder's mode", "folder's group", "folder's owner", "link's owner",
    "link into a folder of others", "link over a folder of others", "link to a link",
]  # fmt: skip


@needs_root
@pytest.mark.parametrize("how", HOW)
def test_root_refuses_a_configuration_that_others_can_change(folder: Path, how: str) -> None:
    file = folder / "almanac.toml"
    assert load_config(file).site.cluster == "c"
    require_trusted(file)
    spoil(folder, how)
    with pytest.raises(ConfigError, match=r"belongs to .* and has mode 0\d{3}: expected owner root") as raised:
        load_config(file)
    assert "chmod go-w /" in raised.value.hint or "chown " in raised.value.hint
    with pytest.raises(ConfigError):
        require_trusted(file)
    with pytest.raises(ConfigError):
        read_trusted(file, (), 100)
    for command in raised.value.hint.partition("then: ")[2].split("; "):
        assert os.system(command) == 0
    assert trust_fault(file) is None or "almanac.toml" not in how, "the fix that is named is enough"
    load_config(file)


@needs_root
@pytest.mark.parametrize("how", HOW)
def test_another_user_reads_it_and_doctor_can_say_so(folder: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(folder, how)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY + 1)
    assert load_config(folder / "almanac.toml").site.cluster == "c"
    require_trusted(folder / "almanac.toml")
    assert trust_fault(folder / "almanac.toml")


@needs_root
def test_the_user_who_runs_this_is_trusted_but_not_by_root(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(folder / "almanac.toml", NOBODY, -1)
    assert trust_fault(folder / "almanac.toml")
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert trust_fault(folder / "almanac.toml") is None


def test_a_sticky_folder_and_links_within_trusted_folders_are_fine(folder: Path) -> None:
    folder.chmod(0o1777)
    (folder / "a").symlink_to("b")
    (folder / "b").symlink_to(folder / "almanac.toml")
    assert trust_fault(folder / "a") is None
    assert load_config(folder / "a").site.cluster == "c"


@needs_root
@pytest.mark.parametrize(
    ("text", "owner", "mode", "is_trusted"),
    [
        ("SlurmUser=nobody\n", 0, 0o644, True),
        ("  slurmuser = nobody # of old\n", 0, 0o644, True),
        (f"SlurmUser={NOBODY}\n", 0, 0o644, True),
        ("SlurmUser=root\n", NOBODY, 0o644, True),
        ("SlurmUser=nobody\n", NOBODY, 0o600, True),
        ("#SlurmUser=nobody\n", 0, 0o644, False),
        ("ClusterName=SlurmUser=nobody\n", 0, 0o644, False),
        ("SlurmUser=nobody\n", 0, 0o666, False),
        ("SlurmUser=nobody\n", NOBODY, 0o664, False),
        ("SlurmUser=no-such-user\n", 0, 0o644, False),
        ("", 0, 0o644, False),
    ],
)
def test_slurm_of_slurm_user_is_trusted(
    slurm_conf: Path, folder: Path, text: str, owner: int, mode: int, is_trusted: bool
) -> None:
    """Slurm on NFS belongs to SlurmUser at many sites, and slurmd obeys slurm.conf as root."""
    slurm_conf.write_text(text)
    os.chown(slurm_conf, owner, -1)
    slurm_conf.chmod(mode)
    os.chown(folder, NOBODY, -1)
    os.chown(folder / "almanac.toml", NOBODY, -1)
    fault = trust_fault(folder / "almanac.toml")
    assert (fault is None) == is_trusted
    (folder / "almanac.toml").chmod(0o666)
    assert trust_fault(folder / "almanac.toml"), "and never what others can write"


@needs_root
def test_a_slurm_conf_from_the_environment_names_nobody(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo -E` keeps the variable of the user who calls it."""
    own = tmp_path / "own"
    own.write_text("SlurmUser=nobody\n")
    os.chown(own, NOBODY, -1)
    monkeypatch.setenv("SLURM_CONF", str(own))
    os.chown(folder / "almanac.toml", NOBODY, -1)
    assert trust_fault(folder / "almanac.toml")


@pytest.mark.parametrize("kind", ["fifo", "folder", "large", "not UTF-8", "missing", "loop"])
def test_what_is_no_such_file_is_an_error_and_never_waits(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file"
    if kind == "fifo":
        os.mkfifo(path, 0o600)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.write_bytes(bytes(101))
    elif kind == "not UTF-8":
        path.write_bytes(b"\xff")
    elif kind == "loop":
        path.symlink_to(path)
    with pytest.raises((OSError, ValueError)):
        read_trusted(path, (), 100)
    with pytest.raises(ConfigError):
        load_config(path) if kind != "large" else parse_nothing(path)


def parse_nothing(path: Path) -> None:
    path.write_bytes(b"#" * (5 << 20))
    load_config(path)
