"""Files are read without waiting and within bounds; root refuses a file that others can change."""

from __future__ import annotations

import json
import os
import pwd
from pathlib import Path

import pytest

from almanac import files
from almanac.config_file import load_config
from almanac.errors import ConfigError
from almanac.files import (
    DEEPEST,
    parse_json,
    read_json,
    read_plain,
    read_trusted,
    require_trusted,
    trust_fault,
    with_checksum,
)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.mkdir()


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _large(path: Path) -> None:
    path.write_bytes(b"1" * 101)


@pytest.mark.parametrize("make", [_fifo, _folder, _device, _large])
def test_what_is_no_small_regular_file_is_refused_at_once(make: object, tmp_path: Path) -> None:
    assert callable(make)
    make(tmp_path / "file")
    with pytest.raises(OSError, match=r"not a regular file|larger than 100 bytes|directory"):
        read_plain(tmp_path / "file", 100)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 100_000,
     b"[" * (DEEPEST + 2) + b"]" * (DEEPEST + 2), b'{"a":' * 99 + b"1" + b"}" * 99, b"\xff{}",
     b'{"a": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_every_bad_content_is_a_value_error(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError):
        read_json(tmp_path / "file")


def test_brackets_within_a_text_are_no_nesting() -> None:
    assert parse_json(json.dumps({"hosts": "[" * 1000}).encode()) == {"hosts": "[" * 1000}


@pytest.mark.parametrize(
    "content", [{}, {"until_s": 1}, {"a": {"sum": "0123456789abcdef"}}, {"sum": "0123456789abcdef"}]
)
@pytest.mark.parametrize("indent", [None, 1])
def test_a_checksum_is_not_part_of_the_content(content: dict[str, object], indent: int | None) -> None:
    text = with_checksum(json.dumps(content, indent=indent))
    assert parse_json(text) == content
    assert isinstance(json.loads(text), dict)


def test_every_flipped_bit_of_a_text_with_a_checksum_is_seen_or_changes_no_value() -> None:
    content = {"last": 7, "days": {"2026-11-27": 5}}
    text = with_checksum(json.dumps(content))
    for place in range(len(text) * 8):
        spoiled = bytearray(text)
        spoiled[place // 8] ^= 1 << place % 8
        try:
            found = parse_json(bytes(spoiled))
        except ValueError:
            continue
        assert content.items() <= found.items()


def test_a_text_without_a_checksum_is_believed() -> None:
    assert parse_json(b'{"until_s": 1}\n') == {"until_s": 1}


NOBODY = pwd.getpwnam("nobody").pw_uid
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture(autouse=True)
def slurm_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The slurm.conf of this host; there is none at first."""
    path = tmp_path / "slurm.conf"
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(files, "SLURM_CONFS", (str(path),))
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
    [("SlurmUser=nobody\n", 0, 0o644, True), ("  slurmuser = nobody # of old\n", 0, 0o644, True),
     (f"SlurmUser={NOBODY}\n", 0, 0o644, True), ("SlurmUser=root\n", NOBODY, 0o644, True),
     ("SlurmUser=nobody\n", NOBODY, 0o600, True), ("#SlurmUser=nobody\n", 0, 0o644, False),
     ("ClusterName=SlurmUser=nobody\n", 0, 0o644, False), ("SlurmUser=nobody\n", 0, 0o666, False),
     ("SlurmUser=nobody\n", NOBODY, 0o664, False), ("SlurmUser=no-such-user\n", 0, 0o644, False),
     ("", 0, 0o644, False)],
)  # fmt: skip
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
