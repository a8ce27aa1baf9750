"""The file that keeps what a share search measured: between jobs, at the same time, and with any content."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.decisions.pack_shares import ShareTry
from slurm_hooks.pack import search_file
from slurm_hooks.pack.search_file import (
    CLAIM_S,
    KEPT_S,
    MOST_BYTES,
    MOST_CLAIMS,
    Claim,
    Saved,
    SearchFile,
    file_name,
    state_folder,
)

SAVED = Saved((ShareTry((100, 100), (1.5, None)), ShareTry((50, 100), (1.0, 2.0), 3)), {"7:0": Claim((100, 50), 990.0)})


def made(folder: Path, now_s: float = 1000.0) -> SearchFile:
    return SearchFile(folder / "almanac" / "pack" / "train.json", 2, lambda: now_s)


def write(file: SearchFile, saved: Saved = SAVED) -> None:
    file.change(lambda _: (saved, None))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = made(tmp_path)
    assert file.read() == Saved()
    write(file)
    assert file.read() == SAVED
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.path.parent.stat().st_mode) == 0o700
    assert {path.name for path in file.path.parent.iterdir()} == {"train.json", "train.lock"}


def content(**changes: object) -> bytes:
    one = {"shares": [100, 100], "steps_per_s": [1.0, 2.0], "runs": 1}
    return json.dumps({"version": 1, "written_s": 1000.0, "tries": [one], "claims": {}, **changes}).encode()


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"{" * 100_000,
        b"[" * 60_000,
        b" " * (MOST_BYTES + 1),
        content()[:-5],
        content(version=2),
        content(written_s=float("nan")),
        content(written_s="now"),
        content(tries={"a": 1}),
        content(tries=[{"shares": [100], "steps_per_s": [1.0, 2.0], "runs": 1}]),
        content(tries=[{"shares": [100, 15], "steps_per_s": [1.0, 2.0], "runs": 1}]),
        content(tries=[{"shares": [100, True], "steps_per_s": [1.0, 2.0], "runs": 1}]),
        content(tries=[{"shares": [100, 50], "steps_per_s": [1.0], "runs": 1}]),
        content(tries=[{"shares": [100, 50], "steps_per_s": [1.0, -2.0], "runs": 1}]),
        content(tries=[{"shares": [100, 50], "steps_per_s": [1.0, float("inf")], "runs": 1}]),
        content(tries=[{"shares": [100, 50], "steps_per_s": [1.0, "2"], "runs": 1}]),
        content(tries=[{"shares": [100, 50], "steps_per_s": [1.0, 2.0], "runs": 0}]),
        content(tries=[{"shares": [100, 50], "steps_per_s": [1.0, 2.0], "runs": 1e9}]),
        content(tries=[{"shares": [100, 50], "steps_per_s": [1.0, 2.0], "runs": 1}] * 101),
        content(claims=[]),
        content(claims={"a": 3}),
        content(claims={"a": {"shares": [100, 50], "since_s": None}}),
    ],
)
def test_content_that_is_not_understood_starts_again(tmp_path: Path, bad: bytes) -> None:
    file = made(tmp_path)
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(bad)
    found = file.read()
    assert (found.tries, found.claims) == ((), {})
    assert str(file.path) in found.fault
    write(file)
    assert file.read() == SAVED


def test_huge_numbers_are_no_crash(tmp_path: Path) -> None:
    file = made(tmp_path)
    file.path.parent.mkdir(parents=True)
    file.path.write_bytes(content().replace(b"2.0", b"9" * 400))
    assert file.read().fault
    file.path.write_bytes(content().replace(b"2.0", b"9" * 5000))
    assert file.read().fault


def test_old_measurements_and_dead_claims_are_dropped(tmp_path: Path) -> None:
    write(made(tmp_path))
    assert made(tmp_path, 990.0 + CLAIM_S).read() == replace(SAVED, claims={})
    assert made(tmp_path, 1001.0 + KEPT_S).read().tries == ()
    assert "older than 90 days" in made(tmp_path, 1001.0 + KEPT_S).read().fault
    assert made(tmp_path, 900.0).read() == SAVED  # another node's clock is behind


def test_a_thousand_runs_at_once_do_not_erase_what_was_measured(tmp_path: Path) -> None:
    file = made(tmp_path)
    claims = {f"12345678{number:08x}:0": Claim((50, 100), 500.0 + number % 400) for number in range(1000)}
    write(file, Saved(SAVED.tries, {"new": Claim((60, 40), 999.0), **claims}))
    found = file.read()
    assert (found.tries, found.fault, len(found.claims)) == (SAVED.tries, "", MOST_CLAIMS)
    assert found.claims["new"] == Claim((60, 40), 999.0)


def test_a_file_of_another_user_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(made(tmp_path))
    monkeypatch.setattr(search_file.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(OSError, match=f"belongs to another user .uid {os.geteuid()}"):
        made(tmp_path).read()


def test_files_that_are_none(tmp_path: Path) -> None:
    file = made(tmp_path)
    file.path.parent.mkdir(parents=True)
    os.mkfifo(file.path)
    with pytest.raises(OSError, match="not a regular file"):
        file.read()
    file.path.unlink()
    file.path.symlink_to("/etc/passwd")
    with pytest.raises(OSError):
        file.read()
    file.path.unlink()
    file.path.with_suffix(".new").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        write(file)
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "almanac").write_text("")
    with pytest.raises(OSError):
        write(made(tmp_path))


def test_a_lock_that_is_kept_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_file, "LOCK_S", 0.1)
    file = made(tmp_path)

    def inner(saved: Saved) -> tuple[Saved, None]:
        with pytest.raises(TimeoutError, match="locked by another run"):
            write(made(tmp_path))
        return saved, None

    file.change(inner)


def add_claims(folder: Path, number: int) -> None:
    for count in range(20):
        claim = {f"{number}-{count}": Claim((100, 100), 1000.0)}
        made(folder).change(lambda saved, claim=claim: (replace(saved, claims={**saved.claims, **claim}), None))


def test_runs_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=add_claims, args=(tmp_path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert len(made(tmp_path).read().claims) == 80


def test_a_change_that_fails_leaves_the_file(tmp_path: Path) -> None:
    write(made(tmp_path))

    def fail(saved: Saved) -> tuple[Saved, None]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        made(tmp_path).change(fail)
    assert made(tmp_path).read() == SAVED


def test_where_it_lies() -> None:
    assert state_folder({"XDG_STATE_HOME": "/s", "HOME": "/h"}) == Path("/s/almanac/pack")
    assert state_folder({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == Path("/h/.local/state/almanac/pack")
    assert state_folder({"HOME": ""}) is None


def test_names_are_plain_and_differ_by_what_matters() -> None:
    assert file_name("train-7", ["p"]) == file_name("train-8", ["p"])
    assert file_name("train-7", ["p"]) != file_name("train-7", ["q"])
    for name in ("../../etc/passwd", "a/b", "", "\n\x1b[31m", "x" * 300, "-rf", ".", "\udcff"):
        found = file_name(name, [name])
        assert found.endswith(".json") and len(found) <= 62
        assert set(found) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-_")
        assert found[0] not in ".-"
