"""The file that keeps what a share search measured: between jobs, at the same time, and with any content."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor.packing.shares import ShareTry
from slurm_hooks.packing import search_file
from slurm_hooks.packing.search_file import (
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
from slurm_hooks.packing.share_search import Progress, ProgressMeter, parse_progress, read_progress

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


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"1234", Progress(1234)),
        (b"1234\n", Progress(1234)),
        (b"step 1234\n", Progress(1234)),
        (b"step: 12.5", Progress(12.5)),
        (b"step=7 / 100\n", Progress(7, 100)),
        (b"flop 3.5e15\n", Progress(3.5e15)),
        (b"flop 3.6e21/7.2e24\n", Progress(3.6e21, 7.2e24)),  # one GPU after hours, and the end of the run
        (b"7200000000000000000000000\n", Progress(7.2e24)),
        (b"step 3\r\nloss 0.1\n", Progress(3)),
        (b"0", Progress(0)),
    ],
)
def test_lines_that_are_understood(content, expected):
    assert parse_progress(content) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\n5\n",
        b"step",
        b"-5",
        b"step -5",
        b"nan",
        b"inf",
        b"step 1234 of 5000",
        b"9" * 31,
        b"1e99",
        b"5/4",
        b"5/0",
        b"5/",
        b"\x00\x00\x00\x00",
        b"\xff\xfe5\x00",
        "５".encode(),
        b"\x1b[31m5",
        b"$(reboot) 5",
        b"step " * 60 + b"5",
        b"1" * 4096,
    ],
)
def test_anything_else_is_not_known(content):
    assert parse_progress(content) is None


@given(st.binary(max_size=300))
def test_any_content_is_a_count_or_nothing(content):
    found = parse_progress(content)
    assert found is None or 0 <= found.done <= 1e30


def test_progress_files_that_are_none(tmp_path):
    assert read_progress(str(tmp_path / "absent")) is None
    assert read_progress(str(tmp_path)) is None
    assert read_progress("bad\0name") is None
    os.mkfifo(tmp_path / "fifo")
    assert read_progress(str(tmp_path / "fifo")) is None
    assert read_progress("/dev/zero") is None
    (tmp_path / "step").write_text("step 5\n")
    assert read_progress(str(tmp_path / "step")) == Progress(5)


def observed(*counts, gap_s=10.0) -> tuple[ProgressMeter, float]:
    meter = ProgressMeter()
    for number, count in enumerate(counts):
        meter.observe(gap_s * number, None if count is None else Progress(count))
    return meter, gap_s * (len(counts) - 1)


def test_the_rate_begins_with_the_first_change():
    """0 for 20 s while the program starts, then 100 at 30 s, 130 at 40 s, 160 at 50 s: 60 steps in 20 s."""
    meter, now_s = observed(0, 0, 0, 100, 130, 160)
    assert meter.rate(now_s) == 3.0


def test_too_little_is_not_zero():
    assert observed()[0].rate(100) is None
    assert observed(None, None)[0].rate(1000) is None
    assert observed(5)[0].rate(1000) is None
    assert observed(5, 6)[0].rate(1000) is None
    assert observed(5, 6, 8)[0].rate(20) is None  # 2 steps in 10 s


def test_a_count_that_falls_begins_again():
    meter, now_s = observed(0, 1000, 2000, 0, 10, 20, 30)
    assert meter.rate(now_s) == 1.0


def test_a_standstill_lowers_the_rate():
    meter, now_s = observed(0, 10, 20, 30)
    assert meter.rate(now_s + 100) == 1.0
    assert meter.rate(now_s + 180) == 20 / 200


def test_restart_forgets_the_rate_but_not_the_count():
    meter, now_s = observed(0, 10, 20, 30)
    meter.restart()
    assert meter.rate(now_s) is None
    assert meter.last == Progress(30)
