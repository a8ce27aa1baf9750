"""After `almanac forget`, no file that almanac wrote names the person: a new table or file fails here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from golden_site import NOW_S, UIDS, Bench

from cli.forget_places import JOBS, OF_CLUSTER
from reports.mail.record import EndedRun, MailRecord, Message, record_path
from slurm_hooks.distribute import distribute
from slurm_hooks.orders import JsonLines
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

USER, OTHER = "benabel", "carlabel"
KINDS = {
    "advice/sched", "advice/user", "ended", "store/actions", "store/advice", "store/jobs",
    "store/published", "store/reports",
}  # fmt: skip
"""Folders with something that names the person, or one of their jobs in a log."""


def _files(site: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(each for part in ("store", "advice", "ended") for each in (site / part).rglob("*")):
        if path.is_file():
            yield str(path.relative_to(site)), path.read_bytes() + (_texts(path) if path.suffix == ".parquet" else b"")


def _texts(path: Path) -> bytes:
    """The values of the columns of text, each once."""
    columns = [column for column in pq.ParquetFile(path).read().columns if "string" in str(column.type)]
    flat = [pc.list_flatten(column) if pa.types.is_list(column.type) else column for column in columns]
    return str([column.unique().to_pylist() for column in flat]).encode()


def _naming(site: Path, jobs: list[tuple[int, int]]) -> list[str]:
    """Files with the name in them, the uid in their path, or a job in a log or a notice."""
    found = []
    for name, content in _files(site):
        numbers = [f'"job_id": {job}, "submit_s": {at}'.encode() for job, at in jobs] if ".jsonl" in name else []
        is_theirs = any(each in content for each in (USER.encode(), *numbers))
        if is_theirs or str(UIDS[USER]) in name.split("/") or any(f"ended/{job}." in name for job, _ in jobs):
            found.append(name)
    return found


def _fill(bench: Bench, site: Path) -> dict[str, list[tuple[int, int]]]:
    """Write what the golden site lacks: published files, mails, logs, and notices. Returns runs by user."""
    distribute(site / "store" / "published" / "demo", site / "advice", 0)
    rows = Store.open(site / "store").of("demo").read("jobs", ["job_id", "submit_s", "user", "end_s"]).to_pylist()
    runs = {user: [(row["job_id"], row["submit_s"]) for row in rows if row["user"] == user] for user in (USER, OTHER)}
    for prefix in ("reprioritize-", "mig-raise-", "place-"):
        lines = [{"cluster": "demo", "job_id": job, "submit_s": at} for own in runs.values() for job, at in own]
        JsonLines(site / "store" / "actions", prefix).append(lines, NOW_S)
        with (site / "store" / "actions" / f"{prefix}2026-11-18.jsonl").open("ab") as log:
            log.write(b'{"cut off\n')
    (site / "ended").mkdir()
    with MailRecord(record_path(site / "store")) as record:
        for user, own in runs.items():
            run = EndedRun("demo", *own[0], user, NOW_S, 1)
            record.notice([run])
            record.trying(Message(f"<{user}@x>", user, f"{user}@b", "job", f"Dear {user}".encode(), (run,)), NOW_S)
            (site / "ended" / f"{own[0][0]}.0a").touch()
    return runs


@pytest.mark.skipif(os.geteuid() != 0, reason="almanac-distribute is for root")
def test_nothing_names_a_forgotten_person_and_lines_of_others_stay(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = bench.copied(bench.published.parents[2])
    monkeypatch.setattr(os, "geteuid", os.getuid)
    runs = _fill(bench, site)
    before = dict(_files(site))
    assert {"/".join(name.split("/")[:2]) if name[0] != "e" else "ended" for name in _naming(site, runs[USER])} == KINDS
    assert "All of it is removed." in bench.run("forget", USER, "--yes", site=site)
    assert _naming(site, runs[USER]) == []
    after = dict(_files(site))
    for name in (name for name in before if ".jsonl" in name):
        numbers = [f'"job_id": {job}, "submit_s": {at}'.encode() for job, at in runs[USER]]
        lines = before[name].splitlines(keepends=True)
        assert after[name] == b"".join(line for line in lines if not any(each in line for each in numbers))
    gone = {name for name in before if not name.endswith("parquet")} - after.keys()
    assert all(str(UIDS[USER]) in name or "ended/" in name for name in gone), gone


def test_every_table_that_says_whose_a_row_is_has_a_place() -> None:
    known = {place.where: place.key for place in (JOBS, *OF_CLUSTER)}
    for table in TABLES.values():
        columns = {"user", "job_id", "job_label"} & set(table.schema.names)
        assert not columns or columns & set(known[table.name]), table.name
