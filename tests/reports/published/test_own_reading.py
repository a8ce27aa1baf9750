"""Reading a user's own reports: what is damaged, another's, or planted is named and not used."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from publisher import CLUSTER, IS_ROOT, NOW_S, Publisher

from almanac.errors import FileFormatError, StoreError
from reports.job.conclusions import report_of
from reports.published.caller import JOBS, REPORT

only_root = pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")


def test_who_has_nothing_is_told_so(publisher: Publisher) -> None:
    with pytest.raises(StoreError, match="no reports for you are published") as caught:
        _ = publisher.of("alice").index
    assert "by mail" in caught.value.hint


def replaced(publisher: Publisher, content: bytes) -> None:
    path = publisher.root / "user" / "60001" / "jobs"
    path.chmod(0o600)
    path.write_bytes(content)
    path.chmod(0o400)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"garbage",
        gzip.compress(b"no json\n", mtime=0),
        gzip.compress(b"[]\n", mtime=0),
        gzip.compress(b"[" * 100_000 + b"\n", mtime=0),
        gzip.compress(b'{"almanac": "report", "version": 4}\n', mtime=0),
        gzip.compress(b'{"almanac": "jobs", "version": 4}\n', mtime=0),
        gzip.compress(b'{"almanac": "jobs", "version": 4}\n', mtime=0),
        gzip.compress(
            b'{"almanac": "jobs", "version": 4, "cluster": "c", "user": "u", "written_s": 1, "runs": 3}\n', mtime=0
        ),
        gzip.compress(bytes(100 << 20), mtime=0),
        bytes(JOBS.most_bytes + 1),
    ],
    ids=["empty", "garbage", "no-json", "list", "nested", "kind", "keys", "format", "types", "bomb", "large"],
)
def test_a_damaged_file_is_named_and_not_used(published: Publisher, content: bytes) -> None:
    replaced(published, content)
    with pytest.raises(FileFormatError, match="user/60001/jobs"):
        _ = published.of("alice").index


@pytest.mark.parametrize("plant", ["link", "fifo", "folder", "writable"])
def test_what_others_could_have_made_is_not_read(published: Publisher, tmp_path: Path, plant: str) -> None:
    path = published.root / "user" / "60001" / "jobs"
    content = path.read_bytes()
    if plant == "writable":
        path.chmod(0o666)
    else:
        path.unlink()
        (tmp_path / "other").write_bytes(content)
        {"link": lambda: path.symlink_to(tmp_path / "other"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[
            plant
        ]()
    with pytest.raises((StoreError, FileFormatError)):
        _ = published.of("alice").index


@only_root
def test_a_file_of_another_user_is_not_read(published: Publisher) -> None:
    os.chown(published.root / "user" / "60001" / "jobs", 60_002, 60_002)
    with pytest.raises(FileFormatError, match="other users can write"):
        _ = published.of("alice").index


@pytest.mark.parametrize("name", ["../../60002/jobs", "/etc/passwd", "..", "1-1-zz", ""])
def test_a_list_names_reports_of_its_own_folder_only(published: Publisher, name: str) -> None:
    index = published.of("alice").index
    runs = tuple(dataclasses.replace(run, report=name) for run in index.runs)
    replaced(published, JOBS.render(dataclasses.replace(index, runs=runs)))
    with pytest.raises(StoreError, match="not published"):
        published.of("alice").reports([101])


@given(cut=st.floats(0, 1), flip=st.integers(0, 255))
def test_no_damage_to_a_report_is_more_than_an_error(reported: Any, cut: float, flip: int) -> None:
    content = bytearray(REPORT.render(report_of(reported.contexts["balanced"])))
    content[int(cut * (len(content) - 1))] ^= flip
    for damaged in (bytes(content), bytes(content[: int(cut * len(content))])):
        with contextlib.suppress(FileFormatError):
            assert REPORT.parse(damaged).value.job_id == 101


def test_a_list_of_another_user_is_not_shown(published: Publisher) -> None:
    index = JOBS.parse((published.root / "user" / "60001" / "jobs").read_bytes()).value
    assert (index.user, index.cluster, index.written_s) == ("alice", CLUSTER, NOW_S)
