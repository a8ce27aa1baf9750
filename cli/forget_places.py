"""Table of the places where almanac keeps something of one person, and the loop that counts and removes it."""

from __future__ import annotations

import contextlib
import glob
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from advisor.version_folders import VERSION, description
from almanac.atomic import locked, write_atomically, writing
from almanac.config import Config
from almanac.errors import AlmanacError, NotAllowedError, StoreError
from almanac.files import parse_json, read_json, read_plain
from almanac.published.outgoing import Outgoing, all_outgoing
from reports.mail.record_file import explained
from reports.published.publish import MANIFEST
from slurm_hooks.jobs.engine import one_at_a_time
from telemetry.store.removal import job_labels, listed_files, mail_choices, own_accounts, runs_of, tree, user_rows
from telemetry.store.schema import TABLES
from telemetry.store.store import ClusterStore, Store

REMOVED = "(removed)"
"""Stands for an account, so that the codes of the others stay the same. No account has such a name."""
RECORD = re.compile(r"(?P<cluster>[A-Za-z0-9_-]+)\.(?P<job>[0-9]{1,10})\..+\.(?P<time>[0-9]{1,12})")
NOTICE = re.compile(r"(?P<job>[1-9][0-9]{0,9})\.[0-9a-f-]{1,36}")
USER, RUN = ("user",), ("job_id", "submit_s")


@dataclass(frozen=True)
class Person:
    """A user whose records are removed. name: in Slurm's accounting. uids: owners of their published files."""

    name: str
    uids: tuple[int, ...]


@dataclass(frozen=True)
class Area:
    """Scope of the search for a place. store: of a cluster, "" for the site. runs: the user's, as `runs_of` gives them.

    folders: what the fields of a place's `where` stand for.
    """

    user: str
    store: ClusterStore
    runs: pa.Table
    folders: Mapping[str, str]

    @property
    def cluster(self) -> str:
        return self.store.cluster

    def path(self, where: str) -> Path:
        return Path(where.format(**self.folders))

    def paths(self, where: str) -> list[Path]:
        found = glob.glob(where.format(**{name: glob.escape(value) for name, value in self.folders.items()}))  # noqa: PTH207
        return [Path(each) for each in sorted(found)]

    @cached_property
    def ends(self) -> dict[tuple[int, int], int]:
        """Time until which a record of a job id belongs to the run, by job id and submission; unix seconds."""
        return {(row["job_id"], row["submit_s"]): row["until_s"] for row in self.runs.to_pylist()}

    @cached_property
    def accounts(self) -> set[str]:
        """The accounts that only this user has."""
        return own_accounts(self.store, self.user)

    @cached_property
    def spans(self) -> dict[int, tuple[int, int]]:
        return {job_id: (submit_s, until_s) for (job_id, submit_s), until_s in self.ends.items()}


@dataclass(frozen=True)
class Place:
    """A row of the table. where: a table of the store, or a pattern of paths. key: what says whose something is.

    walk: counts in `noun` what is the user's, and removes it if told. It looks again each time, so that it also removes
    what came after a count. lock: of the program that writes there. Both raise AlmanacError or OSError.
    """

    name: str
    noun: str
    where: str
    key: tuple[str, ...]
    walk: Callable[[Place, Area, bool], int]
    lock: Callable[[Area], AbstractContextManager[None]] = lambda area: contextlib.nullcontext()


def _rows(place: Place, area: Area, remove: bool) -> int:
    return user_rows(area.store, place.where, place.key, area.user, area.runs, remove)


def _damaged(place: Place, area: Area, remove: bool) -> int:
    """Damaged files, which may hold rows of anybody, cannot be emptied."""
    for table in TABLES:
        area.store.files(table)
    paths = area.store.damaged_files()
    if paths and remove:
        raise StoreError(
            f"{paths[0]}: damaged, so what it holds of the user cannot be removed",
            "replace or remove the files that almanac doctor names",
        )
    return len(paths)


def _lines(place: Place, area: Area, remove: bool) -> int:
    """Lines of JSON. Others, and what is not JSON, stay byte for byte."""

    def is_theirs(line: bytes) -> bool:
        with contextlib.suppress(ValueError, AttributeError, TypeError):
            row = parse_json(line)
            return row.get("cluster") == area.cluster and tuple(map(row.get, place.key)) in area.ends
        return False

    number = 0
    for path in area.paths(place.where):
        lines = read_plain(path).splitlines(keepends=True)
        kept = [line for line in lines if not is_theirs(line)]
        number += len(lines) - len(kept)
        if remove and len(kept) < len(lines):
            _replace(path, b"".join(kept))
    return number


def _files(name: re.Pattern[str], place: Place, area: Area, remove: bool) -> int:
    """Files of a folder, and of `bad` in it, whose names hold a job of the user."""

    def is_theirs(file: str) -> bool:
        match = name.fullmatch(file)
        parts = match.groupdict() if match else {"job": "-1"}
        first_s, last_s = area.spans.get(int(parts["job"]), (0, -1))
        is_here = parts.get("cluster", area.cluster).lower() == area.cluster.lower()
        return is_here and first_s <= int(parts.get("time", first_s)) <= last_s

    folder = area.path(place.where)
    return sum(listed_files(each, is_theirs, remove) for each in (folder, folder / "bad"))


def _documents(edit: Callable[[Area, dict[str, Any]], int], place: Place, area: Area, remove: bool) -> int:
    """JSON objects. edit: takes what is the user's out of one, and counts it."""
    number = 0
    for path in area.paths(place.where):
        document = _document(path)
        try:
            found = edit(area, document)
        except (AttributeError, TypeError, IndexError, KeyError) as error:
            raise StoreError(f"{path}: has a bad field: {error!r}", _NEW_ONE) from error
        number += found
        if found and remove:
            _replace(path, description(document).encode())
    return number


_NEW_ONE = "remove it; `almanac train` and `almanac publish` write a new one"


def _document(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except FileNotFoundError:
        return {}
    except PermissionError as error:
        raise NotAllowedError(f"{path}: cannot be read", "run this as root, or as the store's owner") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read: {error}", _NEW_ONE) from error
    return found if isinstance(found, dict) else {}


def _replace(path: Path, content: bytes) -> None:
    with writing(path):
        write_atomically(path, content, is_handed_over=True)


def _model(area: Area, meta: dict[str, Any]) -> int:
    """Take out accounts that nobody else has, and the newest runs. The trees and margins hold no names."""
    model = meta.get("model")
    if not isinstance(model, dict):
        return 0
    known, unseen = model.get("vocabularies", {}).get("account", []), model.get("unseen", [])
    named = [REMOVED if account in area.accounts else account for account in known]
    kept = [each for each in unseen if (each[0], each[1]) not in area.ends]
    if named == known and len(kept) == len(unseen):
        return 0
    if named != known:
        model["vocabularies"]["account"] = named
    model["unseen"] = kept
    return 1


def _lists(area: Area, manifest: dict[str, Any]) -> int:
    """Take out the user's lists. The next run of publish drops the names of their reports."""
    theirs = _uids(manifest, area.user)
    for uid in theirs:
        del manifest["users"][uid]
    return len(theirs)


def _uids(manifest: Mapping[str, Any], user: str) -> set[str]:
    users = manifest.get("users")
    found = users.items() if isinstance(users, dict) else ()
    return {uid for uid, listed in found if isinstance(listed, dict) and listed.get("user") == user}


def manifest_uids(store: Path, user: str) -> set[int]:
    """Return the uids under which lists were written for the user, who may have no account any more."""
    paths = [outgoing.root / MANIFEST for outgoing in all_outgoing(store)]
    return {int(uid) for path in paths for uid in _uids(_document(path), user) if uid.isascii() and uid.isdecimal()}


def _folders(place: Place, area: Area, remove: bool) -> int:
    """Versions with the user's name in a file, as a word of its own."""
    spellings = "|".join(re.escape(each) for each in {area.user, json.dumps(area.user)[1:-1]})
    word = re.compile(rf"(?<![\w.-])({spellings})(?![\w-])")
    versions = [path for path in area.paths(place.where) if VERSION.fullmatch(path.name)]
    found = [version for version in versions if _has_word(version, word)]
    for version in found if remove else ():
        shutil.rmtree(version)
    return len(found)


def _has_word(folder: Path, word: re.Pattern[str]) -> bool:
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return any(word.search(read_plain(path).decode("utf-8", "replace")) for path in files)


def _database(place: Place, area: Area, remove: bool) -> int:
    """Rows of all tables of an SQLite file that have the column. The file is written again without them."""
    path, (column,) = area.path(place.where), place.key
    with explained(path):
        if not path.exists():
            return 0
        uri = f"{path.absolute().as_uri()}?mode={'rw' if remove else 'ro'}"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=30)) as database:
            names = "SELECT m.name FROM sqlite_master m JOIN pragma_table_info(m.name) c WHERE m.type = 'table'"
            tables = database.execute(f"{names} AND c.name = ?", (column,)).fetchall()
            database.execute("PRAGMA secure_delete = ON")
            database.execute("BEGIN IMMEDIATE" if remove else "BEGIN")
            what, number = "DELETE" if remove else "SELECT count(*)", 0
            for (table,) in tables:
                done = database.execute(f'{what} FROM "{table}" WHERE "{column}" = ?', (area.user,))
                number += done.rowcount if remove else done.fetchall()[0][0]
            database.execute("COMMIT")
            if remove:
                database.execute("VACUUM")
                if database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()[0][0]:
                    raise StoreError(f"{path}: another process reads it", "run this again when it is done")
    return number


def _summarizing(area: Area) -> AbstractContextManager[None]:
    return area.store.summarizing()


def _mailing(area: Area) -> AbstractContextManager[None]:
    return locked(area.path("{store}/reports/outbox.lock"), "decides on reports and sends them now")


def _publishing(area: Area) -> AbstractContextManager[None]:
    return Outgoing(area.path("{published}")).locked()


def _distributing(area: Area) -> AbstractContextManager[None]:
    return locked(area.path("{advice}/.lock"), "publishes now")


def _published(place: Place, area: Area, remove: bool) -> int:
    return tree(area.path(place.where), remove)


OF_CLUSTER = (
    Place("trained models", "file", "{models}/duration/[0-9]*/meta.json", ("account", *RUN),
          partial(_documents, _model)),
    Place("models of own services", "folder", "{models}/services/*", ("any word",), _folders),
    Place("log of site factors", "line", "{store}/actions/reprioritize-????-??-??.jsonl", RUN, _lines,
          lambda area: one_at_a_time(area.store, "reprioritize")),
    Place("log of raised jobs", "line", "{store}/actions/mig-raise-????-??-??.jsonl", RUN, _lines,
          lambda area: one_at_a_time(area.store, "mig-raise")),
    Place("log of placed jobs", "line", "{store}/actions/place-????-??-??.jsonl", RUN, _lines,
          lambda area: one_at_a_time(area.store, "place")),
    Place("records of the Prolog", "file", "{prolog}", ("cluster", "job", "time"), partial(_files, RECORD)),
    Place("notices of ended jobs", "file", "{spool}", ("job",), partial(_files, NOTICE)),
    Place(
        "telemetry", "job label", "telemetry", ("job_label",),
        lambda place, area, remove: job_labels(area.store, area.runs, remove), _summarizing,
    ),
    Place("steps", "row", "steps", RUN, _rows, _summarizing),
    Place("job_metrics", "row", "job_metrics", RUN, _rows, _summarizing),
    Place("gpu_metrics", "row", "gpu_metrics", RUN, _rows, _summarizing),
    Place("step_metrics", "row", "step_metrics", RUN, _rows, _summarizing),
    Place("bindings", "row", "bindings", ("job_id", "seen_s"), _rows, _summarizing),
    Place("advice", "row", "advice", USER, _rows, _summarizing),
    Place("damaged files", "file", "any table", (), _damaged),
)  # fmt: skip
JOBS = Place("jobs", "row", "jobs", USER, _rows)
"""Says which rows, lines, and files of a cluster are the user's. So it goes after them, and only if all are gone: a
second run then finds the rest of a run that failed or was killed."""
OF_SITE = (
    Place("record of mails", "row", "{store}/reports/outbox.sqlite", USER, _database, _mailing),
    Place("files to publish", "file", "{published}/user/{uid}", ("uid",), _published, _publishing),
    Place("record of lists", "line", "{published}/" + MANIFEST, USER, partial(_documents, _lists), _publishing),
    Place("advice file", "file", "{advice}/sched/{uid}", ("uid",), _published, _distributing),
    Place("published for the user", "file", "{advice}/user/{uid}", ("uid",), _published, _distributing),
    Place(
        "choice of mail", "file", "{advice}/mail/{uid}", ("uid", "owner"),
        lambda place, area, remove: mail_choices(area.path("{advice}/mail"), int(area.folders["uid"]), remove),
        _distributing,
    ),
)  # fmt: skip
"""Places that are cleared last, when no timer can fill them again from the table jobs."""


@dataclass(frozen=True)
class KeptData:
    """Data that one place keeps of a person. number: of what the place's noun names."""

    place: Place
    area: Area
    number: int


def find(store: Store, config: Config, person: Person) -> list[KeptData]:
    """Return everything kept of a person now, in the order of removal. Raises StoreError."""
    try:
        return [KeptData(place, area, place.walk(place, area, False)) for place, area in _areas(store, config, person)]
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be read: {error.strerror}", "run this as its owner") from error


def _areas(store: Store, config: Config, person: Person) -> Iterator[tuple[Place, Area]]:
    folders = {
        "store": str(store.root), "advice": config.hooks.advice_dir,
        "prolog": config.bindings.prolog_dir, "spool": config.mail.spool_dir,
    }  # fmt: skip
    clusters = [store.of(name) for name in store.clusters()]
    areas = [Area(person.name, each, runs_of(each, person.name), {**folders, "models": str(each.models_dir)})
             for each in clusters]  # fmt: skip
    yield from ((place, area) for area in areas for place in OF_CLUSTER if folders.get(place.where[1:-1]) != "")
    yield from ((JOBS, area) for area in areas)
    for place in OF_SITE:
        for published in all_outgoing(store.root) if "{published}" in place.where else [Outgoing(store.root)]:
            for uid in person.uids if "{uid}" in place.where else [0]:
                more = {"published": str(published.root), "uid": str(uid)}
                yield place, Area(person.name, store.of(""), pa.table({}), {**folders, **more})


@dataclass(frozen=True)
class RemovalFailure:
    place: str
    error: str
    todo: str


def remove(found: list[KeptData]) -> list[RemovalFailure]:
    """Empty every place that holds something. Returns what failed; the other places are empty then."""
    failures: list[RemovalFailure] = []
    for kept in found:
        name = kept.place.name
        if not kept.number or (kept.place is JOBS and any(each.place != "jobs" for each in failures)):
            continue
        try:
            with kept.place.lock(kept.area):
                kept.place.walk(kept.place, kept.area, True)
        except AlmanacError as error:
            failures.append(RemovalFailure(name, str(error), error.hint))
        except OSError as error:
            said = f"{error.filename or name}: {error.strerror}"
            failures.append(RemovalFailure(name, said, "run this as its owner or root"))
    return failures
