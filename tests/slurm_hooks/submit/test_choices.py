"""The file of a user's answers: found, read without trust, rewritten as a whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from slurm_hooks.submit.choices import (
    MAX_BYTES,
    Choice,
    choices_path,
    find,
    read,
    replaced,
    write,
)

NOW_S = 1_795_256_200
ANSWER = Choice("train-bert-#", 2, "always", "hbm40g", NOW_S)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "almanac" / "choices"


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/a"}, "/home/a/.local/state/almanac/choices"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "/state"}, "/state/almanac/choices"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "relative"}, "/home/a/.local/state/almanac/choices"),
        ({"XDG_STATE_HOME": ""}, None),
        ({"HOME": "relative"}, None),
        ({}, None),
    ],
)
def test_where_it_is(environ: dict[str, str], expected: str | None) -> None:
    assert choices_path(environ) == expected


def test_what_is_written_is_read(path: Path) -> None:
    write(str(path), [ANSWER, Choice("%d$(id)", 1, "never", "hbm80g", 5)])
    assert read(str(path)) == (ANSWER, Choice("%d$(id)", 1, "never", "hbm80g", 5))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_nothing_there_is_nothing_answered(path: Path) -> None:
    assert read(None) == read(str(path)) == ()


def test_what_is_no_file_of_ones_own_is_as_if_empty(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(str(path), [ANSWER])
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)
    assert read(str(path)) == ()
    path.unlink()
    os.mkfifo(path)
    assert read(str(path)) == ()  # at once: nobody writes to it
    path.unlink()
    path.mkdir()
    assert read(str(path)) == ()
    monkeypatch.setattr(os, "getuid", lambda: other.stat().st_uid + 1)
    assert read(str(other)) == ()


def test_too_large_a_file_is_as_if_empty(path: Path) -> None:
    write(str(path), [ANSWER] * (MAX_BYTES // 40 + 100))
    assert path.stat().st_size > MAX_BYTES
    assert read(str(path)) == ()


def test_a_link_is_replaced_and_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    path.parent.mkdir(parents=True)
    path.symlink_to(target)
    write(str(path), [ANSWER])
    assert target.read_text() == "precious"
    assert read(str(path)) == (ANSWER,)


def test_a_temporary_file_that_is_there_is_not_used(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    path.parent.mkdir(parents=True)
    path.with_name(f"choices.{os.getpid()}").symlink_to(target)
    with pytest.raises(FileExistsError):
        write(str(path), [ANSWER])
    assert target.read_text() == "precious"


def test_a_full_disk_leaves_nothing_behind(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(str(path), [ANSWER])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.raises(OSError, match="No space"):
        write(str(path), [])
    assert read(str(path)) == (ANSWER,)
    assert list(path.parent.iterdir()) == [path]


def test_a_new_answer_replaces_the_familys_own() -> None:
    others = (Choice("train-bert-#", 1, "always", "hbm40g", 5), Choice("train-bert-#", 2, "never", "hbm40g", 5))
    assert replaced(others, ANSWER) == (ANSWER, others[0])
    assert find(replaced(others, ANSWER), "train-bert-#", 2) == ANSWER
    assert find((), "train-bert-#", 2) is None


def test_questions_are_forgotten_after_the_hour_answers_are_not() -> None:
    fresh, old = (Choice(key, 1, "asked", "t", NOW_S - age) for key, age in (("fresh", 3599), ("old", 3600)))
    lasting = Choice("lasting", 1, "never", "t", 5)
    assert replaced((old, fresh, lasting), ANSWER) == (ANSWER, fresh, lasting)


def test_it_never_grows_beyond_what_is_read(path: Path) -> None:
    many = [Choice(f"{number:064d}", 1, "never", "hbm40g", NOW_S) for number in range(2000)]
    write(str(path), replaced(many, ANSWER))
    kept = read(str(path))
    assert kept[0] == ANSWER
    assert kept[1:] == tuple(many[: len(kept) - 1])
    assert MAX_BYTES - 200 < path.stat().st_size <= MAX_BYTES
