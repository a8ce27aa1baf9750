"""The spool's reader: it believes what SlurmUser wrote, in the form of the hook, and sets all else aside."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from almanac.errors import SourceError
from almanac.records import Counts
from telemetry.sources.hook_records import UNFINISHED_S, Spool
from telemetry.sources.prolog_record import read_record

LATER_S = 2**35
"""A time at which nothing is new any more."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "ended"
    path.mkdir(mode=0o770)
    path.chmod(0o770)
    return path


def spool(folder: Path, cluster: str = "perl") -> Spool:
    return Spool(folder, cluster, {folder.stat().st_gid})


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    path.chmod(0o644)
    return path


def said(job: int, cluster: str = "perl") -> bytes:
    return f"job_id={job}\ncluster={cluster}\n".encode()


def test_each_file_is_a_job_that_ended(folder: Path) -> None:
    for job in (7, 8):
        put(folder, f"{job}.100{job}", said(job))
    put(folder, "7.3f0c7a52-91de-4c53-a1a5-1f8d94ad4b6e", said(7))
    notices, counts = spool(folder).read(LATER_S)
    assert sorted(notice.job_id for notice in notices) == [7, 7, 8]
    assert (counts.seen, counts.kept, dict(counts.dropped)) == (3, 3, {})
    spool(folder).remove([notice for notice in notices if notice.job_id == 7])
    assert [path.name for path in folder.iterdir()] == ["8.1008"]


def test_jobs_of_other_clusters_are_left_to_their_own(folder: Path) -> None:
    put(folder, "7.1", said(7, "other"))
    put(folder, "8.1", said(8, "PERL"))
    put(folder, "9.1", said(9, ""))
    notices, counts = spool(folder).read(LATER_S)
    assert {notice.job_id for notice in notices} == {8, 9}
    assert counts.seen == 2 and (folder / "7.1").exists()


def test_files_of_a_cluster_whose_almanac_is_off_hide_no_others(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New ones are seen at once, older ones within a few runs; the work of a run is bounded."""
    monkeypatch.setattr("telemetry.sources.hook_records.MOST_FILES", 20)
    opened = list[Path]()

    def reads(path: Path, *more: Any, **options: Any) -> bytes:
        opened.append(path)
        return read_record(path, *more, **options)

    monkeypatch.setattr("telemetry.sources.hook_records.read_record", reads)
    for job in range(1, 101):
        os.utime(put(folder, f"{job}.1", said(job, "other")), (1000 + job, 1000 + job))
    for job, time_s in ((201, 900), (202, 901), (203, 1050), (204, 2000), (205, 2001)):
        os.utime(put(folder, f"{job}.1", said(job)), (time_s, time_s))
    seen = set[int]()
    for minute in range(60):
        opened.clear()
        found = {notice.job_id for notice in spool(folder).read(LATER_S + 60 * minute)[0]}
        assert found >= {204, 205} and len(opened) <= 20
        seen |= found
    assert seen == {201, 202, 203, 204, 205}
    assert len(spool(folder).waiting()) == 20


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [("7.1", b"", "content of another form"), ("7.1", said(8), "content of another form"),
     ("7.1", said(7) + b"user=root\n", "content of another form"), ("7.1", said(7) * 100, "too large"),
     ("7.1", b"job_id=7\ncluster=\xff\n", "content of another form"), ("0.1", said(0), "file name of another form"),
     ("x", said(7), "file name of another form"), ("7.1\n8.1", said(7), "file name of another form"),
     (".7.1", said(7), "file name of another form")],
)  # fmt: skip
def test_what_the_hook_did_not_write_is_excluded_once(folder: Path, name: str, content: bytes, reason: str) -> None:
    put(folder, name, content)
    notices, counts = spool(folder).read(LATER_S)
    assert (notices, dict(counts.dropped), counts.seen) == ([], {reason: 1}, 1)
    assert (folder / "bad" / name).read_bytes() == content
    assert spool(folder).read(LATER_S)[1].seen == 0


def test_links_folders_and_fifos_are_excluded_unopened(folder: Path, tmp_path: Path) -> None:
    put(tmp_path, "elsewhere", said(7))
    (folder / "7.1").symlink_to(tmp_path / "elsewhere")
    (folder / "8.1").mkdir()
    os.mkfifo(folder / "9.1")
    notices, counts = spool(folder).read(LATER_S)
    assert notices == [] and counts.seen == sum(counts.dropped.values()) == 3
    assert {path.name for path in folder.iterdir()} == {"bad"}


def test_what_lies_badly_is_not_moved_through_a_link(folder: Path, tmp_path: Path) -> None:
    """A member of almanac's group who plants `bad` must not choose where root moves a file that they named."""
    (tmp_path / "cron.d").mkdir()
    (folder / "bad").symlink_to(tmp_path / "cron.d")
    put(folder, "evil", b"* * * * * root true\n")
    _, counts = spool(folder).read(LATER_S)
    assert dict(counts.dropped) == {"file name of another form": 1}
    assert list((tmp_path / "cron.d").iterdir()) == []
    with pytest.raises(OSError):
        spool(folder).count_bad()


def test_a_second_name_of_a_file_is_not_believed(folder: Path) -> None:
    put(folder, "7.1", said(7))
    put(folder, "8.1", said(8))
    os.link(folder / "8.1", folder / "8.2")
    notices, counts = spool(folder).read(LATER_S)
    assert [notice.name for notice in notices] == ["7.1"]
    assert dict(counts.dropped) == {"a second name of another file": 2}


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make files of others")
def test_a_file_of_a_user_is_not_believed(folder: Path) -> None:
    os.chown(folder, 2, -1)
    for name, owner in (("1.1", 0), ("2.1", 2), ("3.1", 65534)):
        os.chown(put(folder, name, said(int(name[0]))), owner, -1)
    put(folder, "4.1", said(4)).chmod(0o666)
    notices, counts = spool(folder).read(LATER_S)
    assert [notice.job_id for notice in notices] == [1, 2]
    assert counts.dropped.total() == 2


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o772])
def test_a_folder_that_others_may_write_to_is_not_read(folder: Path, mode: int) -> None:
    put(folder, "7.1", said(7))
    folder.chmod(mode)
    with pytest.raises(SourceError, match="others can write"):
        spool(folder).read(LATER_S)


def test_a_group_that_is_not_almanacs_may_not_write_to_it(folder: Path) -> None:
    with pytest.raises(SourceError, match="others can write"):
        Spool(folder, "perl", {folder.stat().st_gid + 1}).read(LATER_S)


def test_what_is_being_written_is_given_time(folder: Path) -> None:
    path = put(folder, "7.1", b"")
    now_s = int(path.stat().st_mtime)
    assert spool(folder).read(now_s)[1].seen == 0
    put(folder, "7.1", said(7))
    assert [notice.job_id for notice in spool(folder).read(now_s + 2 * UNFINISHED_S)[0]] == [7]


def test_what_rsync_is_bringing_is_given_time(folder: Path) -> None:
    """It has the time of its original already, and gets its name next."""
    path = put(folder, ".7.1.Ab3dEf", said(7))
    os.utime(path, (1, 1))
    now_s = int(path.stat().st_ctime)
    assert spool(folder).read(now_s + UNFINISHED_S - 1) == ([], Counts())
    assert path.exists()
    _, counts = spool(folder).read(now_s + UNFINISHED_S)
    assert dict(counts.dropped) == {"file name of another form": 1}


def test_what_is_gone_meanwhile_is_no_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "7.1", said(7))
    names = [".7.2.Ab3dEf", "8.1", "7.1"]
    monkeypatch.setattr(Spool, "_names", lambda self, seed: names)
    notices, counts = spool(folder).read(LATER_S)
    assert ([notice.job_id for notice in notices], counts.seen, counts.dropped) == ([7], 1, {})


def test_without_a_folder_there_is_no_hook(tmp_path: Path) -> None:
    assert not Spool(tmp_path / "none", "perl", {0}).is_there


@given(content=st.binary(max_size=300))
def test_no_content_is_believed_but_the_hooks_own(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("spool")
    put(folder, "7.1", content)
    notices, counts = spool(folder).read(LATER_S)
    assert bool(notices) == (content in (said(7), said(7, "")))
    assert counts.seen == counts.kept + counts.dropped.total()
