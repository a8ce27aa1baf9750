"""`almanac doctor` on the store: its files, how far each source was read, and stale days."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from almanac.units import DAY_S, counted, format_count, format_duration, format_moment
from cli.app import App
from cli.doctor.findings import Check
from telemetry.sources.configured import configured_sources

if TYPE_CHECKING:
    from telemetry.store.check import Damaged
    from telemetry.store.cluster_store import ClusterStore
    from telemetry.store.partitions import Stray
    from telemetry.store.store import Store

_SHOWN = 5
"""Damaged files that the text names; JSON has all."""


def check_store(app: App, verify: bool = False) -> Iterator[Check]:
    store = app.open_store()
    clusters = store.clusters()
    if not clusters:
        yield Check("store", "warn", f"{store.root} holds no jobs yet", "run `almanac ingest`")
        return
    yield Check("store", "ok", f"{store.root} holds {', '.join(clusters)}")
    yield from _check_files(store, verify)
    for cluster in clusters:
        yield from _check_watermarks(app, store.of(cluster))
        yield from _check_open_days(app, store.of(cluster))
        yield from _check_retention(app, store.of(cluster))
    yield from _check_forgotten(store)


def _check_files(store: Store, verify: bool) -> Iterator[Check]:
    from telemetry.store.check import check_files

    found = check_files(store, None) if verify else check_files(store)
    if found.strays:
        said = f"{len(found.strays)} skipped in the store: {_named(store, found.strays)}"
        details = {"strays": [{"path": str(one.path), "reason": one.reason} for one in found.strays]}
        yield Check("strays", "warn", said, "move them out of the store", details)
    files, read = format_count(found.files), format_count(found.read)
    if not found.damaged:
        pages = "all pages match" if found.read == found.files else f"the pages of the newest {read} match"
        more = "" if found.read == found.files else " (--verify reads all)"
        yield Check("store files", "ok", f"{files} files, all with an intact footer; {pages} their checksums{more}")
        return
    yield Check(
        "store files",
        "fail",
        f"{len(found.damaged)} of {files} cannot be read: {_named(store, found.damaged)}",
        _cure(found.damaged[0]),
        {"damaged": [{"path": str(one.path), "reason": one.reason} for one in found.damaged]},
    )


def _cure(damaged: Damaged) -> str:
    """The fix for a damaged file, for its day."""
    from telemetry.store.damage import FORBIDDEN

    table, day = damaged.path.parents[2].name, damaged.path.parent.name.removeprefix("date=")
    again = {"jobs": "ingest", "steps": "ingest", "telemetry": "ingest", "bindings": "ingest"} | dict.fromkeys(
        ("job_metrics", "gpu_metrics", "step_metrics"), "summarize"
    )
    if damaged.reason == FORBIDDEN:
        return "run this as the store's owner"
    if table not in again:
        return "restore each from a backup, or move it out of the store: its rows are lost then"
    return (
        f"restore each from a backup; or move it out of the store and read its day again: "
        f"almanac {again[table]} -S {day}T00:00:00Z -E {day}T23:59:59Z (docs/admin.md)"
    )


def _named(store: Store, found: Sequence[Damaged | Stray]) -> str:
    named = [f"{one.path.relative_to(store.root)} ({one.reason})" for one in found[:_SHOWN]]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return f"{', '.join(named)}{more}"


def _check_watermarks(app: App, store: ClusterStore) -> Iterator[Check]:
    from telemetry.store.marks import ahead_s

    for source, mark_s in store.watermarks().items():
        if ahead := ahead_s(mark_s, app.now_s()):
            yield Check(f"{source} of {store.cluster}", "fail", *_future(mark_s, ahead))
    for source in [name for name in configured_sources(app.config) if name in ("sacct", "prometheus")]:
        mark = store.watermark(source)
        if mark is None:
            yield Check(f"{source} of {store.cluster}", "warn", "never read", "run `almanac ingest` on a timer")
            continue
        if ahead_s(mark, app.now_s()):
            continue
        age_s = max(0, app.now_s() - mark)
        late = age_s > DAY_S
        said = f"read up to {format_duration(age_s)} ago"
        yield Check(
            f"{source} of {store.cluster}",
            "warn" if late else "ok",
            said,
            "check why the timer stopped" if late else "",
        )


def _future(mark_s: int, ahead_s: int) -> tuple[str, str]:
    """The finding and the fix for a watermark in the future."""
    said = f"its watermark is {format_moment(mark_s)}, {format_duration(ahead_s)} in the future: a clock was ahead"
    return said, "check this host's clock with `timedatectl`, then run `almanac ingest`, which corrects it"


def _check_open_days(app: App, store: ClusterStore) -> Iterator[Check]:
    """Stale days that ended at least a day ago; the newest days are always stale."""
    from telemetry.store.marks import day_text

    today = app.now_s() // DAY_S
    late = sorted(day for day in store.peek_open_days() if day < today - 1)
    if late:
        said = f"{format_count(len(late))} stale {'day' if len(late) == 1 else 'days'}, the oldest {day_text(late[0])}"
        yield Check(f"job metrics of {store.cluster}", "warn", said, "run `almanac summarize`")


def _check_retention(app: App, store: ClusterStore) -> Iterator[Check]:
    """What the next summary removes."""
    from telemetry.store.retention import expired

    limits = {table: days for table, days in vars(app.config.retention).items() if days}
    if not limits:
        return
    found = expired(store, app.config.retention, app.now_s())
    said = "; ".join(each.line("to remove") for each in found) or "nothing is older than [retention] keeps"
    yield Check(f"retention of {store.cluster}", "ok", said, "", {"expired": [each.as_dict() for each in found]})


def _check_forgotten(store: Store) -> Iterator[Check]:
    """Runs of `almanac forget` that did not remove everything."""
    from telemetry.store.forgotten import read_forgotten

    begun = [each.before_s for each in read_forgotten(store.root).people.values() if each.done_s is None]
    if begun:
        said = f"{counted(len(begun), 'removal')} not finished, begun on {format_moment(min(begun))}"
        yield Check("forgotten users", "fail", said, "run `almanac forget USER --yes` again")
