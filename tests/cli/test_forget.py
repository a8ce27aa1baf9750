"""`almanac forget`: everything of one person goes, nothing of anybody else, and later runs bring nothing back."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from fake_accounting import CLUSTER, Accounting, job

from almanac.atomic import locked
from almanac.config_file import load_config
from almanac.errors import BusyError, NotAllowedError, StoreError
from cli import train as training
from cli.app import App
from cli.main import cli
from reports.mail.record import EndedRun, MailRecord, Message, record_path
from slurm_hooks.jobs.log import JobLine, JobLog
from telemetry.ingest import LEFT_OUT, configured_spans, ingest_all
from telemetry.store.removal import mail_choices, tree
from telemetry.store.schema import TABLES
from telemetry.store.store import Store

T0_S = 1_790_000_000
UID, OTHER_UID = 60_123, 60_124
VERSION = "20260901T000000Z"


@dataclass(frozen=True)
class Site:
    """A store, advice, mail, models, and logs in which `person` and `other` each have two jobs on one node."""

    folder: Path
    person: str
    other: str

    @property
    def store(self) -> Store:
        return Store.open(self.folder / "store")

    def __call__(self, *argv: str) -> tuple[int, str]:
        options = ["--config", str(self.folder / "almanac.toml"), "--store", str(self.folder / "store")]
        done = CliRunner().invoke(cli, [*options, "forget", *argv], standalone_mode=False)
        if done.exception:
            raise done.exception
        return done.return_value or 0, done.output

    def forget(self) -> tuple[int, str]:
        return self("--yes", "--uid", str(UID), "--", self.person)

    def rows(self, table: str) -> list[dict[str, Any]]:
        return [row for name in ("c", "d") for row in self.store.of(name).read(table).to_pylist()]

    def ids(self) -> set[int]:
        """Of the person's jobs."""
        return {1, 2}

    def of_others(self) -> dict[str, list[dict[str, Any]]]:
        """All rows of all tables that are not the person's; of telemetry, all rows."""
        found = {}
        for table in TABLES:
            rows = self.rows(table)
            found[table] = [
                {**row, "job_label": None if row.get("job_label") in self.ids() else row.get("job_label")}
                for row in rows
                if row.get("user") != self.person and row.get("job_id") not in self.ids()
            ]
        return found


def _rows(cluster: str, site: Site) -> dict[str, list[dict[str, Any]]]:
    """The tables of a cluster: jobs 1 and 2 are the person's, 11 and 12 the other's."""
    jobs, found = [(1, site.person), (2, site.person), (11, site.other), (12, site.other)], {}
    day = {number: T0_S + (86_400 if number % 10 == 2 else 0) for number, _ in jobs}
    found["jobs"] = [
        {"job_id": number, "submit_s": day[number], "start_s": day[number] + 60, "end_s": day[number] + 3600,
         "user": user, "account": f"{user}-lab", "name": f"{user}'s run", "gpu_count": 1, "node_list": "n1"}
        for number, user in jobs
    ]  # fmt: skip
    keys = [{"job_id": number, "submit_s": day[number]} for number, _ in jobs]
    found["steps"] = [{**key, "step": "0"} for key in keys]
    found["job_metrics"] = [{**key, "verdict": "ok"} for key in keys]
    found["gpu_metrics"] = [{**key, "host": "n1", "gpu": 0, "mig": ""} for key in keys]
    found["step_metrics"] = [{**key, "step": "0", "verdict": "ok"} for key in keys]
    found["bindings"] = [
        {"job_id": number, "host": "n1", "gpu": 0, "origin": "prolog", "seen_s": day[number] + 61} for number, _ in jobs
    ]
    # Job id 1 was somebody else's years ago.
    found["bindings"].append({**found["bindings"][0], "seen_s": T0_S - 400 * 86_400})
    found["telemetry"] = [
        {"host": "n1", "gpu": number // 10, "mig": "", "time_ms": (day[number] + 600) * 1000, "job_label": number}
        for number, _ in jobs
    ]
    found["advice"] = [
        {"published_s": T0_S, "user": user, "kind": "F", "name_key": f"{user}", "gpu_count": 1, "predicted_s": 60}
        for user in ("", site.person, site.other)
    ]
    found["node_counts"] = [{"node_set": "all", "time_s": T0_S, "total": 3}]
    return found if cluster == "c" else {"jobs": found["jobs"][:3], "job_metrics": found["job_metrics"][:3]}


def _fill(site: Site) -> None:
    store = Store.create(site.folder / "store")
    for cluster in ("c", "d"):
        for table, rows in _rows(cluster, site).items():
            store.of(cluster).write(table, pa.Table.from_pylist(rows))
    with MailRecord(record_path(store.root)) as record:
        runs = [
            EndedRun("c", number, T0_S, user, T0_S + 3600, 1) for number, user in ((1, site.person), (11, site.other))
        ]
        record.notice(runs)
        for run in runs:
            record.trying(Message(f"<{run.job_id}@x>", run.user, "a@b", "job", b"Dear", (run,)), T0_S)
    log = JobLog(store.root / "actions", "reprioritize")
    log.append([JobLine("set", T0_S, "c", number, T0_S, 0, "SiteFactor", "0", "5", "x") for number in (1, 11)], T0_S)
    _fill_models(site, store.of("c").models_dir)
    _fill_advice(site)


def _fill_models(site: Site, models: Path) -> None:
    for kind in ("duration", "services"):
        (models / kind / VERSION).mkdir(parents=True)
    accounts = [f"{site.person}-lab", f"{site.other}-lab"]
    unseen = [[number, T0_S, 1.0, 2.0] for number in (1, 11)]
    meta = {"schema": 4, "model": {"vocabularies": {"account": accounts, "qos": ["q"]}, "unseen": unseen}}
    (models / "duration" / VERSION / "meta.json").write_text(json.dumps(meta))
    (models / "services" / VERSION / "meta.json").write_text(json.dumps({"services": {"own": {site.person: 3}}}))


def _fill_advice(site: Site) -> None:
    advice = site.folder / "advice"
    (advice / "mail").mkdir(parents=True)
    (advice / "sched").mkdir()
    for uid, user in ((UID, site.person), (OTHER_UID, site.other)):
        (advice / "sched" / str(uid)).write_text(user)
        (advice / "user" / str(uid) / "reports").mkdir(parents=True)
        (advice / "user" / str(uid) / "reports" / "1-2-3").write_text(user)
        (advice / "mail" / str(uid)).write_text("off")
        os.chown(advice / "mail" / str(uid), uid, -1)
    (advice / "mail" / f"{UID}.1").write_text("not theirs")
    users = {str(uid): {"user": user, "digest": "x", "newest_end_s": 1} for uid, user in
             ((UID, site.person), (OTHER_UID, site.other))}  # fmt: skip
    outgoing = site.folder / "store" / "published" / "c"
    for uid, user in ((UID, site.person), (OTHER_UID, site.other)):
        (outgoing / "user" / str(uid)).mkdir(parents=True)
        (outgoing / "user" / str(uid) / "advice").write_text(user)
    (outgoing / ".reports.json").write_text(json.dumps({"cluster": "c", "users": users, "unwritable": []}))
    (site.folder / "almanac.toml").write_text(
        f'[hooks]\nadvice_dir = "{advice}"\n[mail]\nspool_dir = "{site.folder}/spool"\n'
    )


@pytest.fixture(params=[("ann", "annabel"), ("../o'É%_\"; DROP TABLE run--", "o'é%x")])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    made = Site(tmp_path, *request.param)
    _fill(made)
    return made


@pytest.fixture
def plain(tmp_path: Path) -> Site:
    made = Site(tmp_path, "ann", "bob")
    _fill(made)
    return made


def _contents(folder: Path) -> Iterator[tuple[Path, bytes]]:
    """Every file with all that can be read of it: of a Parquet file also its rows."""
    for path in folder.rglob("*"):
        if path.is_symlink() or not path.is_file():
            yield path, os.fsencode(path.name)
            continue
        content = path.read_bytes()
        if path.suffix == ".parquet":
            content += str(pq.ParquetFile(path).read().to_pylist()).encode()
        yield path, os.fsencode(path.name) + content


def _naming(site: Site) -> set[Path]:
    """Files that hold the person's name, and not as a part of the other's."""
    spellings = {site.person, json.dumps(site.person)[1:-1], repr(site.person)[1:-1]}
    found = set()
    for path, content in [*_contents(site.folder / "store"), *_contents(site.folder / "advice")]:
        for spelling in (site.other, json.dumps(site.other)[1:-1], repr(site.other)[1:-1]):
            content = content.replace(spelling.encode(), b"")
        if any(spelling.encode() in content for spelling in spellings):
            found.add(path)
    return found


def test_nothing_of_the_person_is_left_and_everything_of_others_is(site: Site) -> None:
    before, named = site.of_others(), _naming(site)
    assert {path.parts[len(site.folder.parts)] for path in named} == {"store", "advice"}, "the test would see nothing"
    code, shown = site("--uid", str(UID), "--", site.person)
    assert code == 0 and "Nothing was removed" in shown
    assert _naming(site) == named and site.of_others() == before
    assert site.forget()[0] == 0
    assert _naming(site) == set()
    after = site.of_others()
    assert after == before
    assert all(row.get("job_id") not in site.ids() or row["seen_s"] < T0_S for rows in
               (site.rows(table) for table in TABLES) for row in rows)  # fmt: skip
    assert {row["job_label"] for row in site.rows("telemetry")} == {None, 11, 12}
    _require_others_files(site)
    assert site.forget()[0] == 0, "a second run"
    assert site.of_others() == before


def _require_others_files(site: Site) -> None:
    advice = site.folder / "advice"
    assert (advice / "sched" / str(OTHER_UID)).read_text() == site.other
    assert sorted(path.name for path in (advice / "user").iterdir()) == [str(OTHER_UID)]
    assert sorted(path.name for path in (advice / "mail").iterdir()) == [f"{UID}.1", str(OTHER_UID)]
    outgoing = site.folder / "store" / "published" / "c"
    assert [path.name for path in (outgoing / "user").iterdir()] == [str(OTHER_UID)]
    assert set(json.loads((outgoing / ".reports.json").read_text())["users"]) == {str(OTHER_UID)}
    meta = json.loads((site.store.of("c").models_dir / "duration" / VERSION / "meta.json").read_text())
    assert meta["model"]["vocabularies"] == {"account": ["(removed)", f"{site.other}-lab"], "qos": ["q"]}
    assert [each[0] for each in meta["model"]["unseen"]] == [11]
    with sqlite3.connect(record_path(site.store.root)) as database:
        users = database.execute("SELECT user FROM run").fetchall()
    assert users == [(site.other,)]
    lines = (site.store.root / "actions").glob("*.jsonl")
    assert [json.loads(line)["job_id"] for path in lines for line in path.read_text().splitlines()] == [11]


def test_accounting_does_not_bring_the_person_back(plain: Site) -> None:
    """Jobs from before are left out and counted, with their steps; the person's later jobs are kept."""
    plain.forget()
    forgotten = plain.store.of(CLUSTER).forgotten()
    before_s = next(iter(forgotten.people.values())).before_s
    accounting = Accounting(lambda: before_s + 9000)
    accounting.rows = [
        job(21, before_s - 100, submit_s=before_s - 2000), job(22, before_s + 2000, submit_s=before_s - 1),
        job(23, before_s + 2000, submit_s=before_s), job(24, before_s - 100, submit_s=before_s - 2000, user="annabel"),
    ]  # fmt: skip
    (plain.folder / "almanac.toml").write_text("[slurm]\nread_steps = false\n")
    store = plain.store.of(CLUSTER)
    site = App.of(store, load_config(plain.folder / "almanac.toml"), before_s + 9000).but(commands=accounting)
    for _ in range(2):
        results = ingest_all(store, list(configured_spans(site, ["sacct"], before_s - 9000)))
        assert results["sacct"].error is None
        assert results["sacct"].counts.dropped[LEFT_OUT] == 2
    assert sorted(store.read("jobs")["job_id"].to_pylist()) == [23, 24]


def test_a_writer_that_read_before_the_removal_writes_nothing_back(plain: Site) -> None:
    """An import or publish that had the rows in memory: they are left out under the store's lock."""
    rows = {table: plain.store.of("c").read(table) for table in ("jobs", "advice")}
    plain.forget()
    for table, known in rows.items():
        plain.store.of("c").write(table, known)
    assert {row["user"] for row in plain.rows("jobs")} == {"bob"}
    assert {row["user"] for row in plain.rows("advice")} == {"", "bob"}


def test_a_training_that_began_before_is_not_kept(plain: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    train, before = training.train, set(plain.store.of("c").models_dir.rglob("*"))

    def meanwhile(*arguments: Any) -> Any:
        plain.forget()
        return train(*arguments)

    monkeypatch.setattr(training, "train", meanwhile)
    done = CliRunner().invoke(cli, ["--store", str(plain.store.root), "-M", "c", "train"], standalone_mode=False)
    assert isinstance(done.exception, BusyError) and "forgotten while this training ran" in str(done.exception)
    assert set(plain.store.of("c").models_dir.rglob("*")) <= before


def test_what_cannot_be_removed_is_named_and_a_second_run_finishes(plain: Site) -> None:
    with locked(plain.store.root / ".summary-c.lock"), locked(plain.folder / "advice" / ".lock"):
        code, shown = plain.forget()
    assert code == 4
    assert "error: steps:" in shown and "another process" in shown and "then run this again" in shown
    assert [row["job_id"] for row in plain.store.of("c").read("jobs").to_pylist()] == [1, 11, 2, 12], "still the key"
    assert next(iter(plain.store.of("c").forgotten().people.values())).done_s is None
    assert plain.forget()[0] == 0
    assert _naming(plain) == set()
    assert next(iter(plain.store.of("c").forgotten().people.values())).done_s is not None


def test_links_in_folders_of_users_are_not_followed(plain: Site, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "reports").write_text("kept")
    advice = plain.folder / "advice"
    (advice / "user" / str(UID) / "link").symlink_to(kept)
    choice = advice / "mail" / str(UID)
    choice.unlink()
    choice.symlink_to(kept / "reports")
    os.chown(choice, UID, -1, follow_symlinks=False)
    assert plain.forget()[0] == 0
    assert (kept / "reports").read_text() == "kept"
    assert not os.path.lexists(choice) and not (advice / "user" / str(UID)).exists()


def test_only_the_owner_removes_and_only_a_persons_own_uid(plain: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="uid 0 belongs to root"):
        plain("--yes", "--uid", "0", "ann")
    for name in ("", "a\nb"):
        with pytest.raises(Exception, match="is not a user name"):
            plain("--yes", "--", name)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(NotAllowedError, match="belongs to another user"):
        plain.forget()
    monkeypatch.undo()
    assert len(plain.rows("jobs")) == 7
    (plain.store.root / "forgotten.json").write_text("{}")
    with pytest.raises(StoreError, match=r"forgotten\.json: cannot be read"):
        plain.store.of("c").write("jobs", plain.store.of("d").read("jobs"))


def test_a_fifo_in_the_place_of_the_mail_record_is_not_waited_for(plain: Site) -> None:
    record_path(plain.store.root).unlink()
    os.mkfifo(record_path(plain.store.root))
    with pytest.raises(StoreError, match="not a regular file"):
        plain.forget()


def test_a_damaged_file_may_hold_rows_of_the_person_and_is_not_passed_over(plain: Site) -> None:
    path = plain.store.of("d").files("job_metrics")[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    code, said = plain.forget()
    assert code == 4
    assert f"{path}: damaged, so what it holds of the user cannot be removed" in said
    path.write_bytes(whole)
    assert plain.forget()[0] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_mounts_over_a_user_s_files_keep_nothing(tmp_path: Path) -> None:
    """A user can mount FUSE file systems over files of their own; unlink then says EBUSY."""
    for name in ("user/7/reports/list", "mail/7", "sched/7"):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
        os.chown(path, 7, 7)
        for _ in range(2):
            subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "user/7/reports")], check=True)
    try:
        for remove in (False, True):
            counts = [tree(tmp_path / "sched/7", remove), tree(tmp_path / "user/7", remove)]
            assert [*counts, mail_choices(tmp_path / "mail", 7, remove)] == [1, 1, 1]
        assert str(tmp_path) not in Path("/proc/self/mountinfo").read_text()
        assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    finally:
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if str(tmp_path) in line:
                subprocess.run(["umount", "-l", line.split()[4]], check=False)
