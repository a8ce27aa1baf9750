"""Every place where almanac keeps something of one person, in the order in which `almanac forget` removes it.

The table jobs says which rows, lines, and files belong to the person. So it goes after those, and only if all of them
are gone: a second run then finds the rest of a run that failed or was killed. Places that hold the name or the uid come
last, when no timer can fill them again from the table jobs.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from almanac.config import Config
from almanac.errors import AlmanacError, StoreError
from almanac.kept import Kept
from cli.mig_raise import one_at_a_time as one_raise_at_a_time
from cli.place import one_at_a_time as one_placement_at_a_time
from cli.reprioritize import one_at_a_time
from telemetry.store.cluster_store import ClusterStore
from telemetry.store.forgotten import Forgetting, read_forgotten, write_forgotten
from telemetry.store.schema import TABLES
from telemetry.store.store import Store


@dataclass(frozen=True)
class Person:
    """name: in Slurm's accounting. uids: of their published files."""

    name: str
    uids: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """of_jobs, jobs: of one cluster each. by_name: of the whole site."""

    of_jobs: tuple[tuple[str, Kept], ...]
    jobs: tuple[tuple[str, Kept], ...]
    by_name: tuple[Kept, ...]

    def all(self) -> list[tuple[str, Kept]]:
        """Each place with its cluster; "" for a place of the whole site."""
        return [*self.jobs, *self.of_jobs, *(("", kept) for kept in self.by_name)]


def find(store: Store, config: Config, person: Person) -> Places:
    """What is kept of a person now. Raises StoreError."""
    from telemetry.store.removal import jobs_place

    clusters = store.clusters()
    return Places(
        tuple((name, kept) for name in clusters for kept in _of_jobs(store.of(name), config, person.name)),
        tuple((name, jobs_place(store.of(name), person.name)) for name in clusters),
        tuple(_by_name(store.root, Path(config.hooks.advice_dir), person)),
    )


def _of_jobs(store: ClusterStore, config: Config, user: str) -> Iterator[Kept]:
    from advisor.forget import model_places
    from slurm_hooks.forget import log_place, placement_place, raise_place, record_places
    from telemetry.store.removal import own_accounts, runs_of, table_places

    found = runs_of(store, user)
    columns: list[list[Any]] = [found[name].to_pylist() for name in ("job_id", "submit_s", "until_s")]
    runs = set(zip(columns[0], columns[1], strict=True))
    spans = {job_id: (submit_s, until_s) for job_id, submit_s, until_s in zip(*columns, strict=True)}
    yield from model_places(store.models_dir, user, runs, own_accounts(store, user))
    yield _locked(log_place(store.root / "actions", store.cluster, runs), lambda: one_at_a_time(store))
    yield _locked(raise_place(store.root / "actions", store.cluster, runs), lambda: one_raise_at_a_time(store))
    yield _locked(placement_place(store.root / "actions", store.cluster, runs), lambda: one_placement_at_a_time(store))
    yield from record_places(config.bindings.prolog_dir, config.mail.spool_dir, store.cluster, spans)
    for kept in table_places(store, user, found):
        yield _locked(kept, store.summarizing)
    yield _damaged(store)


def _damaged(store: ClusterStore) -> Kept:
    """Damaged files, which may hold rows of anybody. They cannot be emptied."""
    for table in TABLES:
        store.files(table)
    paths = store.damaged_files()

    def remove() -> None:
        raise StoreError(
            f"{paths[0]}: damaged, so what it holds of the user cannot be removed",
            "replace or remove the files that almanac doctor names",
        )

    return Kept("damaged files", len(paths), "file", remove)


def _by_name(store_root: Path, advice_dir: Path, person: Person) -> Iterator[Kept]:
    from reports.mail.outbox_file import outbox_path
    from reports.mail.outbox_forget import outbox_place
    from reports.published.forget import manifest_place
    from telemetry.store.atomic import locked
    from telemetry.store.outgoing import all_outgoing
    from telemetry.store.user_removal import published_places, staged_place

    yield outbox_place(outbox_path(store_root), person.name)
    for outgoing in all_outgoing(store_root):
        for uid in person.uids:
            yield _locked(staged_place(outgoing.root, uid), outgoing.locked)
        yield _locked(manifest_place(outgoing.root, person.name), outgoing.locked)
    for uid in person.uids:
        for kept in published_places(advice_dir, uid):
            yield _locked(kept, lambda: locked(advice_dir / ".lock", "publishes now"))


def _locked(kept: Kept, lock: Callable[[], AbstractContextManager[None]]) -> Kept:
    """The same place, with the lock of the program that writes there while it is emptied."""

    def remove() -> None:
        with lock():
            kept.remove()

    return dataclasses.replace(kept, remove=remove)


@dataclass(frozen=True)
class Failure:
    place: str
    error: str
    todo: str


def remove(places: Places) -> list[Failure]:
    """Empty every place that holds something. Returns what failed; the other places are empty then."""
    failures = list(_failures([kept for _, kept in places.of_jobs]))
    if not failures:
        failures += _failures([kept for _, kept in places.jobs])
    return [*failures, *_failures(places.by_name)]


def _failures(places: list[Kept] | tuple[Kept, ...]) -> Iterator[Failure]:
    for kept in places:
        if not kept.number:
            continue
        try:
            kept.remove()
        except AlmanacError as error:
            yield Failure(kept.place, str(error), error.hint)
        except OSError as error:
            yield Failure(
                kept.place, f"{error.filename or kept.place}: {error.strerror}", "run this as its owner or root"
            )


@dataclass
class Outcome:
    """is_complete: whether nothing is left of the person."""

    is_complete: bool = False


@contextlib.contextmanager
def remembered(store: Store, user: str, now_s: int) -> Iterator[Outcome]:
    """Put the person on the list of forgotten people before anything is removed, and note a complete end after it."""
    outcome = Outcome()
    _remember(store, user, Forgetting(now_s))
    yield outcome
    if outcome.is_complete:
        _remember(store, user, Forgetting(now_s, now_s))


def _remember(store: Store, user: str, forgetting: Forgetting) -> None:
    with store.lock():
        write_forgotten(store.root, read_forgotten(store.root).with_person(user, forgetting))
