"""The end of a job's error output: what is read, what is not, and what of it reaches a terminal."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurm import error_file
from slurm.error_file import error_path, last_lines, submitted_file

JOB = {"job_id": 12, "array_job_id": None, "array_task_id": None, "user": "ann", "name": "../../etc/x"}
TASK = {**JOB, "job_id": 15, "array_job_id": 12, "array_task_id": 3}


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch) -> int:
    """The uid of who runs this. Root reads nothing, so that root's number counts as a user's here."""
    uid = os.getuid()
    monkeypatch.setattr(error_file, "ROOT", -1)
    return uid


def test_the_last_lines_are_shown_without_escapes(tmp_path: Path, owner: int) -> None:
    file = tmp_path / "err"
    text = (
        "x" * 9000
        + "\nold\n"
        + "\x1b]0;title\x07\x1b[31mred\x1b[0m\x1b[2J\r\n\x9b1mloss 10%\rloss 20%\n\n\u202eevil\0\n"
    )
    file.write_bytes(text.encode() + b"\xff\xfe caf\xe9\n")
    lines = last_lines(str(file), owner)
    assert lines[-6:-1] == ("old", "red", "?1mloss 10%", "loss 20%", "?evil?")
    assert all(line.isprintable() and len(line) <= 300 for line in lines)
    file.write_text("\n".join(map(str, range(100))))
    assert last_lines(str(file), owner) == tuple(map(str, range(92, 100)))


def link(path: Path) -> None:
    path.symlink_to("/etc/hostname")


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize("make", [link, os.mkfifo, Path.mkdir, listening, Path.touch, lambda path: None])
def test_only_a_regular_file_is_read(tmp_path: Path, owner: int, make: Callable[[Path], None]) -> None:
    make(tmp_path / "e")
    assert last_lines(str(tmp_path / "e"), owner) == ()


@pytest.mark.parametrize(
    "path", ["/dev/zero", "/dev/stdin", "/proc/self/mem", "relative", "", "/x\0y", "/" + "a" * 9000]
)
def test_no_device_and_no_unreadable_path_is_read(owner: int, path: str) -> None:
    assert last_lines(path, owner) == ()


def test_root_and_others_read_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "err"
    file.write_text("secret\n")
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert last_lines(str(file), 0) == ()
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert last_lines(str(file), 1001) == ()
    os.chown(file, 1001, -1) if os.access("/root", os.W_OK) else file.chmod(0)
    assert last_lines(str(file), 1000) == ()


@pytest.mark.parametrize(
    ("asked", "job", "path"),
    [
        ("", JOB, "/w/slurm-12.out"), ("", TASK, "/w/slurm-12_3.out"), ("/a/%x.%j.err", JOB, "/a/../../etc/x.12.err"),
        ("%A-%4a", TASK, "/w/12-0003"), ("%%j", JOB, "/w/%j"), ("%N.err", JOB, ""), ("log/%t", JOB, ""),
        ("\\\\%j", JOB, "/w/%j"), ("%u%q", JOB, "/w/ann%q"), ("%x", {**JOB, "name": None}, ""),
    ],
)  # fmt: skip
def test_slurms_patterns_become_a_path(asked: str, job: dict[str, Any], path: str) -> None:
    assert error_path(asked, "/w", job) == path
    assert error_path("x", "", job) == "" and error_path("/x", "", job) == "/x"


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("sbatch -o a.out -e b.err job.sh", "b.err"), ("sbatch --output=a.out x.sh -e no", "a.out"),
        ("sbatch job.sh", ""), ("", ""), ("sbatch -o", ""), ("sbatch -o a : -o b x.sh", ""),
    ],
)  # fmt: skip
def test_a_command_line_names_the_file(line: str, file: str) -> None:
    assert submitted_file(line) == file
